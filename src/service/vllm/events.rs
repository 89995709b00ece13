//! The stream of prefix-cache events for routers (vLLM's KV-cache events), one for all ranks of a model. The batches of
//! each rank are numbered without gaps, and a stream begins with all existing pages.
//! Not here: past events; a subscriber that has missed events subscribes again.

use super::common;
use crate::engine::page_pool::{Content, PageChange};
use crate::engine::prefix::PageKey;
use crate::engine::request::SinkClosed;
use crate::host::ServedModel;
use crate::kernels::attention::PAGE_TOKENS;
use crate::replica::PageBatch;
use crate::replica::Replica;
use crate::service::refusal::{Refusal, status};
use common::kv_cache_event::Data;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::UNIX_EPOCH;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

/// The number of batches that are buffered for a slow subscriber.
const KEPT: usize = 4096;

/// The event stream of one subscriber.
pub struct PageEvents {
    batches: mpsc::Receiver<(i32, PageBatch)>,
    /// Set on an engine thread when the buffer is full.
    slow: Arc<AtomicBool>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    model: String,
    replicas: Vec<Arc<Replica>>,
    events: u64,
    ended: bool,
}

impl std::fmt::Debug for PageEvents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageEvents").field("events", &self.events).finish_non_exhaustive()
    }
}

impl PageEvents {
    /// Subscribes to all replicas of a model, until `stop` is cancelled. Waits for the engine threads.
    pub fn of(model: &ServedModel, stop: CancellationToken) -> PageEvents {
        let (sender, batches) = mpsc::channel(KEPT);
        let slow = Arc::new(AtomicBool::new(false));
        for (rank, replica) in (0i32..).zip(&model.replicas) {
            let (sender, slow) = (sender.clone(), Arc::clone(&slow));
            replica.follow_pages(Box::new(move |batch| {
                if slow.load(Ordering::Acquire) {
                    return Err(SinkClosed);
                }
                sender.try_send((rank, batch)).map_err(|error| {
                    if matches!(error, mpsc::error::TrySendError::Full(_)) {
                        slow.store(true, Ordering::Release);
                    }
                    SinkClosed
                })
            }));
        }
        PageEvents {
            batches,
            slow,
            stop: Box::pin(stop.cancelled_owned()),
            model: model.name.clone(),
            replicas: model.replicas.clone(),
            events: 0,
            ended: false,
        }
    }

    fn batch(&mut self, rank: i32, batch: &PageBatch) -> common::KvEventBatch {
        let mut events: Vec<common::KvCacheEvent> = Vec::new();
        // A run of pages that follow each other, or that go together, is one event.
        let mut last = None;
        for change in batch.changes.iter() {
            let open = events.last_mut().and_then(|event| event.data.as_mut());
            match (change, open) {
                (PageChange::Stored(content), Some(Data::Stored(stored))) if content.behind == last => {
                    stored.blocks.push(block(content));
                }
                (PageChange::Removed(name), Some(Data::Removed(removed))) => removed.block_hashes.push(hash(*name)),
                _ => {
                    self.events += 1;
                    events.push(common::KvCacheEvent { event_id: self.events, data: Some(first(change)) });
                }
            }
            last = match change {
                PageChange::Stored(content) => Some(content.name),
                _ => None,
            };
        }
        let at = batch.at.wall().duration_since(UNIX_EPOCH).unwrap_or_default();
        common::KvEventBatch {
            sequence_number: batch.number,
            timestamp: at.as_secs_f64(),
            events,
            dp_rank: Some(rank),
            ..Default::default()
        }
    }

    fn end(&mut self, refusal: &Refusal) -> Poll<Option<Result<common::KvEventBatch, Status>>> {
        self.ended = true;
        Poll::Ready(Some(Err(status(refusal))))
    }
}

/// Returns the hash of a page for the contract: the lower 64 bits of the page's name.
fn hash(name: PageKey) -> i64 {
    name.0 as i64
}

fn block(content: &Content) -> common::KvBlock {
    common::KvBlock {
        block_hash: hash(content.name),
        token_ids: content.tokens.to_vec(),
        block_size: PAGE_TOKENS as i32,
        ..Default::default()
    }
}

/// Returns a new event with this change.
fn first(change: &PageChange) -> Data {
    match change {
        PageChange::Stored(content) => Data::Stored(common::KvBlocksStored {
            blocks: vec![block(content)],
            parent_block_hash: content.behind.map(hash),
            ..Default::default()
        }),
        PageChange::Removed(name) => {
            Data::Removed(common::KvBlocksRemoved { block_hashes: vec![hash(*name)], ..Default::default() })
        }
        PageChange::Cleared => Data::Cleared(common::KvCacheCleared::default()),
    }
}

impl tokio_stream::Stream for PageEvents {
    type Item = Result<common::KvEventBatch, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if self.stop.as_mut().poll(context).is_ready() {
            return self.end(&Refusal::Stopping);
        }
        match self.batches.poll_recv(context) {
            Poll::Ready(Some((rank, batch))) => Poll::Ready(Some(Ok(self.batch(rank, &batch)))),
            // All buffered batches were read, and later ones are lost.
            _ if self.slow.load(Ordering::Acquire) => self.end(&Refusal::Gap),
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) if self.replicas.iter().any(|replica| replica.stopped()) => {
                let model = self.model.clone();
                self.end(&Refusal::Unloaded { model })
            }
            Poll::Ready(None) => self.end(&Refusal::Failed("the engines have ended".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::clock::Moment;
    use tokio_stream::StreamExt;

    fn page(name: u128, behind: Option<u128>) -> PageChange {
        let tokens = [name as u32; PAGE_TOKENS as usize];
        PageChange::Stored(Content { name: PageKey(name), behind: behind.map(PageKey), tokens, shared: true })
    }

    #[tokio::test]
    async fn runs_are_one_event_and_who_is_too_slow_is_told_after_what_was_kept() {
        let (sender, batches) = mpsc::channel(1);
        let slow = Arc::new(AtomicBool::new(true));
        let stop = Box::pin(CancellationToken::new().cancelled_owned());
        let (model, replicas) = ("m".to_owned(), Vec::new());
        let mut events = PageEvents { batches, slow, stop, model, replicas, events: 0, ended: false };
        let removed = |name| PageChange::Removed(PageKey(name));
        let changes = [
            PageChange::Cleared,
            page(1, None),
            page(2, Some(1)),
            page(3, Some(1)),
            removed(2),
            removed(3),
            page(4, None),
        ];
        let batch = PageBatch { number: 7, at: Moment::now(), changes: Arc::from(changes) };
        sender.try_send((1, batch)).unwrap();
        let batch = events.next().await.unwrap().unwrap();
        assert_eq!((batch.sequence_number, batch.dp_rank, batch.events.len()), (7, Some(1), 5));
        let Some(Data::Stored(first)) = &batch.events[1].data else { panic!("{batch:?}") };
        let hashes = |stored: &common::KvBlocksStored| -> Vec<i64> {
            stored.blocks.iter().map(|block| block.block_hash).collect()
        };
        assert_eq!((hashes(first), first.parent_block_hash), (vec![1, 2], None));
        let Some(Data::Stored(second)) = &batch.events[2].data else { panic!("{batch:?}") };
        assert_eq!((hashes(second), second.parent_block_hash), (vec![3], Some(1)));
        let Some(Data::Removed(removed)) = &batch.events[3].data else { panic!("{batch:?}") };
        assert_eq!(removed.block_hashes, [2, 3]);
        let ids: Vec<u64> = batch.events.iter().map(|event| event.event_id).collect();
        assert_eq!(ids, [1, 2, 3, 4, 5]);
        assert_eq!(events.next().await.unwrap().unwrap_err().code(), tonic::Code::DataLoss);
        assert!(events.next().await.is_none());
    }
}
