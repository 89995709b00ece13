//! Owns the loading of weights: reads them from files, packs them on a few threads,
//! and has the transfer actor copy them, a staging slot at a time. Does not know what a tensor
//! means, does not allocate device memory, never touches the compute queue.

use super::mailbox::{Address, Mailbox, Refused, mailbox};
use super::transfer::{Piece, Transfer, TransferError};
use crate::device::{DeviceError, Point};
use crate::memory::pack::{Format, Layout, Packing, Rows, pack};
use crate::memory::plan::Bytes;
use crate::memory::{Buffer, MemoryError, StagingRing, WeightFile};
use crate::telemetry::clock::Moment;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Loads that wait while one runs. Each takes seconds: an operator who queues more has made a
/// mistake that should be seen.
const INBOX: usize = 4;
/// Progress reports not yet taken; the next ones make up for those that find no room.
const PROGRESS: usize = 16;
/// One packs 3.5 to 4.5 GB/s (docs/performance.md): so many fill any link.
const MOST_WORKERS: usize = 16;
/// Of so many cores one is left alone: the transfer actor's, which has little to do and must do it at once. Beside as
/// many threads as there are cores it waits for its turn, and they for their slots.
const CORES_PER_FREE: usize = 8;
/// Bytes that a worker packs in memory of its own before it copies them into the slot past the caches. Small enough to
/// stay in a core's second cache with what they are made of, large enough that the end of each copy does not count.
const TILE: usize = 64 << 10;
/// How much less of a core than others a thread gets that gives way: of two that want one, about a tenth.
const NICE: i32 = 10;
/// Packed bytes whose sources are read at once where a file is not mapped, if whole units of rows are not more. With a
/// tile they stay in a core's second cache.
const BAND: u64 = 256 << 10;
/// Pieces start on multiples of this in a slot: a cache line.
const SLOT_ALIGNMENT: u64 = 64;
/// Longest wait for the last copies once they are submitted.
const DRAIN_WAIT: Duration = Duration::from_secs(60);

/// What to load. Plain data apart from the buffers and files.
#[derive(Clone, Debug, Default)]
pub struct LoadPlan {
    /// The packed tensors, in the order in which they are loaded.
    pub tensors: Vec<LoadTensor>,
}

/// One packed tensor and where its rows come from.
#[derive(Clone, Debug)]
pub struct LoadTensor {
    /// For errors.
    pub name: String,
    /// Where it goes.
    pub target: Arc<Buffer>,
    /// First byte there.
    pub offset: u64,
    /// How it lies there.
    pub packing: Packing,
    /// Its rows; packed rows that no source has become zero.
    pub sources: Vec<Source>,
}

/// Rows of one tensor of a checkpoint: row `i` becomes packed row `first_row + i * row_step`.
#[derive(Clone, Debug)]
pub struct Source {
    /// The shard.
    pub file: Arc<WeightFile>,
    /// First byte of the tensor in it.
    pub offset: u64,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// How the shard stores numbers.
    pub format: Format,
    /// Packed row of row 0.
    pub first_row: u32,
    /// Packed rows from one row to the next; at least 1.
    pub row_step: u32,
    /// Added to every number, in f32.
    pub plus: f32,
}

impl Source {
    fn row_bytes(&self) -> u64 {
        u64::from(self.cols) * self.format.bytes() as u64
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.row_bytes() * u64::from(self.rows))
    }

    /// Where some of its rows lie in the file.
    fn bytes_of(&self, rows: &Range<u32>) -> Range<u64> {
        let at = |row: u32| self.offset + u64::from(row) * self.row_bytes();
        at(rows.start)..at(rows.end)
    }
}

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Packed bytes handed to the transfer queue.
    pub bytes_done: u64,
    /// Packed bytes in all.
    pub bytes_total: u64,
}

/// What a load cost.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    /// When the loader took it up.
    pub begin: Moment,
    /// When the last byte was on the device.
    pub end: Moment,
    /// Bytes of the checkpoint.
    pub bytes_read: u64,
    /// Packed bytes, padding included.
    pub bytes_written: u64,
    /// From the first look at the plan to the last byte on the device.
    pub elapsed: Duration,
    /// Reading files (where they are not in the host's memory already), summed over the workers.
    pub read: Duration,
    /// Packing, summed over the workers.
    pub pack: Duration,
    /// Waiting for staging slots, which is waiting for copies, summed over the workers.
    pub staging_wait: Duration,
    /// From the end of packing to the end of the last copy.
    pub drain: Duration,
    /// Threads that packed, and what each did.
    pub workers: Vec<Worker>,
    /// Copies out of staging slots, in how many submissions they went.
    pub slots: u64,
    /// Submissions of the transfer queue meanwhile.
    pub submits: u64,
    /// Everything is on the device once this is reached, as it is; `None` for an empty plan.
    pub point: Option<Point>,
}

/// Where one worker's time went.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worker {
    /// From its first chunk to its last.
    pub begin: Moment,
    /// As `begin` says.
    pub end: Moment,
    /// Reading files.
    pub read: Duration,
    /// Packing.
    pub pack: Duration,
    /// Waiting for staging slots, which is waiting for copies.
    pub staging_wait: Duration,
}

impl LoadReport {
    /// Packed gigabytes (10⁹ bytes) a second, over the whole load.
    pub fn gb_per_second(&self) -> f64 {
        self.bytes_written as f64 / 1e9 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

impl fmt::Display for LoadReport {
    /// `loaded 15.3 GiB in 2.10 s (7.8 GB/s); each of 8 workers read 0.30 s, packed 1.20 s and waited 0.40 s for
    /// staging; last copies 0.02 s`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = |d: Duration| d.as_secs_f64() / self.workers.len().max(1) as f64;
        write!(
            f,
            "loaded {} in {:.2} s ({:.1} GB/s); each of {} workers read {:.2} s, packed {:.2} s and waited {:.2} s \
             for staging; last copies {:.2} s",
            Bytes(self.bytes_written),
            self.elapsed.as_secs_f64(),
            self.gb_per_second(),
            self.workers.len(),
            each(self.read),
            each(self.pack),
            each(self.staging_wait),
            self.drain.as_secs_f64(),
        )
    }
}

/// What a load can end in.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A shard cannot be read, or no staging memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The copies failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The packed tensor is larger than its place.
    #[error("{name} needs {asked} bytes at {offset} of {buffer:?}, which has {has}")]
    TooLarge {
        /// The tensor.
        name: String,
        /// Its packed bytes.
        asked: u64,
        /// Where it should start.
        offset: u64,
        /// The buffer.
        buffer: String,
        /// The buffer's bytes.
        has: u64,
    },
    /// A source does not fit in its tensor.
    #[error(
        "{name}: a source of {rows} × {cols} from row {first_row} in steps of {row_step} is not inside {packed_rows} × {packed_cols}"
    )]
    Outside {
        /// The tensor.
        name: String,
        /// The source's rows.
        rows: u32,
        /// The source's columns.
        cols: u32,
        /// Its first packed row.
        first_row: u32,
        /// Its step.
        row_step: u32,
        /// The tensor's rows.
        packed_rows: u32,
        /// The tensor's columns.
        packed_cols: u32,
    },
    /// The layout needs another number format.
    #[error("{name} cannot be packed as fragments of {format:?}: they need a 2-byte format")]
    NotPackable {
        /// The tensor.
        name: String,
        /// The format asked for.
        format: Format,
    },
    /// The copies did not finish in time.
    #[error("the last copies did not finish in {seconds} s")]
    Stuck {
        /// How long was waited.
        seconds: u64,
    },
    /// Too many loads wait.
    #[error("{waiting} loads are waiting already")]
    Busy {
        /// How many.
        waiting: usize,
    },
    /// A bug; it was logged where it happened, and later loads are tried.
    #[error("a thread that packs has panicked")]
    Panicked,
    /// The load was dropped, or the loader.
    #[error("the load was cancelled")]
    Cancelled,
}

/// Handle of the loader actor of a device. Dropping it cancels what it is loading.
#[derive(Debug)]
pub struct Loader {
    // Order matters: the inbox closes before the thread is joined.
    inbox: Option<Address<Message>>,
    thread: Option<JoinHandle<()>>,
    /// Set once, by drop: a load in progress ends at its next slot.
    closing: Arc<AtomicBool>,
}

/// A load that was asked for. Dropping it cancels it; what was copied so far stays.
#[derive(Debug)]
pub struct Load {
    progress: Receiver<Progress>,
    done: Receiver<Result<LoadReport, LoadError>>,
    cancelled: Arc<AtomicBool>,
}

#[derive(Debug)]
enum Message {
    Load {
        plan: LoadPlan,
        workers: Option<usize>,
        cancelled: Arc<AtomicBool>,
        progress: Sender<Progress>,
        done: Sender<Result<LoadReport, LoadError>>,
    },
}

impl Loader {
    /// Starts the thread. `workers` threads pack; `None`: one for each of the machine's cores, but for one in eight, up
    /// to 16.
    pub fn spawn(transfer: Arc<Transfer>, ring: StagingRing, workers: Option<usize>) -> Loader {
        let (address, inbox) = mailbox(INBOX);
        let closing = Arc::new(AtomicBool::new(false));
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let workers = workers.unwrap_or_else(|| workers_for(cores())).max(1);
        let actor = Actor { transfer, ring, workers, closing: Arc::clone(&closing) };
        let thread = std::thread::Builder::new()
            .name("loader".to_owned())
            .spawn(move || actor.run(&inbox))
            .expect("the host can start a thread");
        Loader { inbox: Some(address), thread: Some(thread), closing }
    }

    /// Loads after the loads asked for before.
    pub fn load(&self, plan: LoadPlan) -> Result<Load, LoadError> {
        self.load_on(plan, None)
    }

    /// As [`Loader::load`], on at most so many threads, where others need the machine: those give way to all other
    /// work.
    pub fn load_on(&self, plan: LoadPlan, workers: Option<usize>) -> Result<Load, LoadError> {
        let (progress, progress_receiver) = bounded(PROGRESS);
        let (done, done_receiver) = bounded(1);
        let cancelled = Arc::new(AtomicBool::new(false));
        let message = Message::Load { plan, workers, cancelled: Arc::clone(&cancelled), progress, done };
        let inbox = self.inbox.as_ref().expect("taken by drop only");
        match inbox.try_send(message) {
            Ok(()) => Ok(Load { progress: progress_receiver, done: done_receiver, cancelled }),
            Err(Refused::Full) => Err(LoadError::Busy { waiting: INBOX }),
            Err(Refused::Ended) => Err(LoadError::Cancelled),
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        drop(self.inbox.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Load {
    /// How far it is, from time to time; closed when it ends.
    pub fn progress(&self) -> &Receiver<Progress> {
        &self.progress
    }

    /// The one result, for a `select!`; [`Load::wait`] is simpler.
    pub fn done(&self) -> &Receiver<Result<LoadReport, LoadError>> {
        &self.done
    }

    /// Has it end soon, with [`LoadError::Cancelled`] unless it has ended before.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits for the end.
    pub fn wait(self) -> Result<LoadReport, LoadError> {
        self.wait_with(|_| ())
    }

    /// Waits for the end and says how far it is meanwhile.
    pub fn wait_with(self, mut say: impl FnMut(Progress)) -> Result<LoadReport, LoadError> {
        self.progress.iter().for_each(&mut say);
        // The loader is gone without a word: it was dropped.
        self.done.recv().unwrap_or(Err(LoadError::Cancelled))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

struct Actor {
    transfer: Arc<Transfer>,
    ring: StagingRing,
    workers: usize,
    closing: Arc<AtomicBool>,
}

/// What the workers of one load share.
struct Shared<'a> {
    plan: &'a LoadPlan,
    chunks: &'a [Chunk],
    next: AtomicUsize,
    bytes_done: AtomicU64,
    bytes_total: u64,
    /// A worker failed: the others stop.
    failed: AtomicBool,
    cancelled: &'a AtomicBool,
    progress: &'a Sender<Progress>,
    submitted: Sender<Result<Point, TransferError>>,
}

impl Actor {
    fn run(self, inbox: &Mailbox<Message>) {
        while let Ok(Message::Load { plan, workers, cancelled, progress, done }) = inbox.recv() {
            let load = || self.load(&plan, workers, &cancelled, &progress);
            let result = catch_unwind(AssertUnwindSafe(load)).unwrap_or(Err(LoadError::Panicked));
            if let Ok(report) = &result {
                tracing::info!(
                    bytes = report.bytes_written,
                    seconds = report.elapsed.as_secs_f64(),
                    gb_per_second = report.gb_per_second(),
                    "{report}"
                );
            }
            // Whoever hears of the end finds the plan's buffers given back.
            drop(plan);
            drop(progress);
            // Nobody may be waiting any more.
            let _ = done.try_send(result);
        }
    }

    fn load(
        &self,
        plan: &LoadPlan,
        workers: Option<usize>,
        cancelled: &AtomicBool,
        progress: &Sender<Progress>,
    ) -> Result<LoadReport, LoadError> {
        let (start, begin) = (Instant::now(), Moment::now());
        for tensor in &plan.tensors {
            check(tensor)?;
        }
        let sizes: Vec<Packing> = plan.tensors.iter().map(|t| t.packing).collect();
        let chunks = cut(&sizes, self.ring.slot_bytes() as u64);
        let bytes_total = sizes.iter().map(Packing::bytes).sum();
        let submits_before = self.transfer.counters().submits;
        // One reply a chunk: room for all.
        let (submitted, points) = bounded(chunks.len());
        let shared = Shared {
            plan,
            chunks: &chunks,
            next: AtomicUsize::new(0),
            bytes_done: AtomicU64::new(0),
            bytes_total,
            failed: AtomicBool::new(false),
            cancelled,
            progress,
            submitted,
        };
        let gives_way = workers.is_some();
        let workers = workers.unwrap_or(self.workers).clamp(1, self.workers).min(chunks.len());
        let results: Vec<Result<Worker, LoadError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers)
                .map(|i| {
                    std::thread::Builder::new()
                        .name(format!("loader.{i}"))
                        .spawn_scoped(scope, || {
                            if gives_way {
                                give_way();
                            }
                            self.work(&shared)
                        })
                        .expect("the host can start a thread")
                })
                .collect();
            let joined = threads.into_iter().map(|t| t.join());
            joined.map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        let packed = Instant::now();
        drop(shared);
        let workers: Vec<Worker> = results.into_iter().collect::<Result<_, _>>()?;
        // All chunks are with the transfer actor; it answers each, or ends.
        let mut point: Option<Point> = None;
        for _ in 0..chunks.len() {
            let one = points.recv().map_err(|_| TransferError::Ended)??;
            if point.is_none_or(|p| p.value < one.value) {
                point = Some(one);
            }
        }
        if let Some(point) = point
            && !self.ring.device().wait_while_moving(point, DRAIN_WAIT)?
        {
            return Err(LoadError::Stuck { seconds: DRAIN_WAIT.as_secs() });
        }
        for source in plan.tensors.iter().flat_map(|t| &t.sources) {
            source.file.unchanged()?;
        }
        let sum = |of: fn(&Worker) -> Duration| workers.iter().map(of).sum();
        Ok(LoadReport {
            begin,
            end: Moment::now(),
            bytes_read: plan.tensors.iter().flat_map(|t| &t.sources).map(|s| s.range().end - s.offset).sum(),
            bytes_written: bytes_total,
            elapsed: start.elapsed(),
            read: sum(|worker| worker.read),
            pack: sum(|worker| worker.pack),
            staging_wait: sum(|worker| worker.staging_wait),
            drain: packed.elapsed(),
            workers,
            slots: chunks.len() as u64,
            submits: self.transfer.counters().submits - submits_before,
            point,
        })
    }

    /// Takes chunks until there are none; the others stop where one fails.
    fn work(&self, shared: &Shared<'_>) -> Result<Worker, LoadError> {
        let (now, none) = (Moment::now(), Duration::ZERO);
        let mut spent = Worker { begin: now, end: now, read: none, pack: none, staging_wait: none };
        let mut buffers = Buffers { tile: vec![0; TILE], band: Vec::new() };
        loop {
            let stop = [shared.cancelled, &*self.closing].iter().any(|flag| flag.load(Ordering::Relaxed));
            if stop {
                return Err(LoadError::Cancelled);
            }
            let index = shared.next.fetch_add(1, Ordering::Relaxed);
            if index >= shared.chunks.len() || shared.failed.load(Ordering::Relaxed) {
                spent.end = Moment::now();
                return Ok(spent);
            }
            if let Err(error) = self.one(shared, &shared.chunks[index], &mut buffers, &mut spent) {
                shared.failed.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
    }

    /// Packs one chunk, a tile at a time, and hands it to the transfer actor.
    fn one(
        &self,
        shared: &Shared<'_>,
        chunk: &Chunk,
        buffers: &mut Buffers,
        spent: &mut Worker,
    ) -> Result<(), LoadError> {
        let start = Instant::now();
        let mut slot = self.ring.acquire()?;
        let have_slot = Instant::now();
        let read_before = spent.read;
        let mut pieces = Vec::with_capacity(chunk.pieces.len());
        for part in &chunk.pieces {
            let tensor = &shared.plan.tensors[part.tensor];
            spent.read += fill(tensor, part.range.clone(), buffers, |offset, bytes| {
                slot.stream((part.at + offset) as usize, bytes);
            })?;
            pieces.push(Piece {
                from: part.at,
                to: Arc::clone(&tensor.target),
                to_offset: tensor.offset + part.range.start,
                bytes: part.range.end - part.range.start,
            });
        }
        let packed = Instant::now();
        self.transfer.copy(slot, pieces, Vec::new(), shared.submitted.clone())?;
        spent.staging_wait += have_slot - start;
        // What was read meanwhile is counted by itself.
        spent.pack += (packed - have_slot).saturating_sub(spent.read - read_before);
        let bytes: u64 = chunk.pieces.iter().map(|p| p.range.end - p.range.start).sum();
        let bytes_done = shared.bytes_done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // One that finds no room is made up for by the next.
        let _ = shared.progress.try_send(Progress { bytes_done, bytes_total: shared.bytes_total });
        Ok(())
    }
}

/// Has the system run this thread only where no other wants to.
fn give_way() {
    // A system that does not let it is none the worse: there are fewer threads as well.
    let _ = rustix::process::nice(NICE);
}

/// Threads that pack on a machine with so many cores.
fn workers_for(cores: usize) -> usize {
    (cores - cores / CORES_PER_FREE).min(MOST_WORKERS)
}

/// A worker's own memory.
struct Buffers {
    /// Packed bytes on their way into the slot.
    tile: Vec<u8>,
    /// Rows of the files that they are made of.
    band: Vec<u8>,
}

/// Packs a part of a tensor from its files, a band of rows at a time, and gives `put` each tile with its offset in the
/// part; gives the time that reading the files took.
fn fill(
    tensor: &LoadTensor,
    part: Range<u64>,
    buffers: &mut Buffers,
    mut put: impl FnMut(u64, &[u8]),
) -> Result<Duration, LoadError> {
    let rows = packed_rows(&tensor.packing, &part);
    // Of the hundreds of experts that a tensor may come from, a part has rows of a few.
    let needed: Vec<&Source> = tensor.sources.iter().filter(|source| !source_rows(source, &rows).is_empty()).collect();
    let started = Instant::now();
    for source in &needed {
        source.file.unchanged()?;
        source.file.announce(&source.bytes_of(&source_rows(source, &rows)))?;
    }
    let mut read = started.elapsed();
    let stride = tensor.packing.row_bytes() * u64::from(tensor.packing.rows_of_unit());
    let band = (BAND / stride).max(1) * stride;
    let mut begin = part.start;
    while begin < part.end {
        let end = part.end.min((begin / band + 1) * band);
        let started = Instant::now();
        let rows = packed_rows(&tensor.packing, &(begin..end));
        let here = needed.iter().map(|source| (*source, source_rows(source, &rows))).filter(|(_, of)| !of.is_empty());
        let here: Vec<(&Source, Range<u32>)> = here.collect();
        let lengths = here.iter().map(|(source, of)| source.row_bytes() * u64::from(of.end - of.start));
        let total = lengths.sum::<u64>() as usize;
        if buffers.band.len() < total {
            buffers.band.resize(total, 0);
        }
        let mut room = &mut buffers.band[..total];
        let mut sources = Vec::with_capacity(here.len());
        for (source, of) in here {
            let bytes = source.bytes_of(&of);
            let (into, rest) = std::mem::take(&mut room).split_at_mut((bytes.end - bytes.start) as usize);
            room = rest;
            sources.push(Rows {
                bytes: source.file.bytes(bytes, into, &tensor.name)?,
                format: source.format,
                rows: of.end - of.start,
                cols: source.cols,
                first_row: source.first_row + of.start * source.row_step,
                row_step: source.row_step,
                plus: source.plus,
            });
        }
        read += started.elapsed();
        while begin < end {
            let tile_end = end.min(begin + buffers.tile.len() as u64);
            let tile = &mut buffers.tile[..(tile_end - begin) as usize];
            pack(&tensor.packing, &sources, begin..tile_end, tile);
            put(begin - part.start, tile);
            begin = tile_end;
        }
    }
    Ok(read)
}

/// The packed rows that a part touches.
fn packed_rows(packing: &Packing, part: &Range<u64>) -> Range<u32> {
    let rows_at_once = u64::from(packing.rows_of_unit());
    let stride = packing.row_bytes() * rows_at_once;
    let (first, end) = (part.start / stride, part.end.div_ceil(stride));
    (first * rows_at_once) as u32..(end * rows_at_once) as u32
}

/// The rows of a source that become some of `rows`.
fn source_rows(source: &Source, rows: &Range<u32>) -> Range<u32> {
    let index = |row: u32| row.saturating_sub(source.first_row).div_ceil(source.row_step).min(source.rows);
    index(rows.start)..index(rows.end)
}

/// Everything about a tensor that can be wrong before it is read.
fn check(tensor: &LoadTensor) -> Result<(), LoadError> {
    let LoadTensor { name, target, offset, packing, sources } = tensor;
    if packing.layout == Layout::Fragments && packing.format.bytes() != 2 {
        return Err(LoadError::NotPackable { name: name.clone(), format: packing.format });
    }
    let end = offset.checked_add(packing.bytes());
    if end.is_none_or(|end| end > target.bytes()) {
        return Err(LoadError::TooLarge {
            name: name.clone(),
            asked: packing.bytes(),
            offset: *offset,
            buffer: target.name().to_owned(),
            has: target.bytes(),
        });
    }
    for source in sources {
        let last = u64::from(source.first_row) + u64::from(source.rows.saturating_sub(1)) * u64::from(source.row_step);
        let fits =
            source.cols <= packing.cols && source.row_step > 0 && (source.rows == 0 || last < u64::from(packing.rows));
        if !fits {
            return Err(LoadError::Outside {
                name: name.clone(),
                rows: source.rows,
                cols: source.cols,
                first_row: source.first_row,
                row_step: source.row_step,
                packed_rows: packing.rows,
                packed_cols: packing.cols,
            });
        }
        source.file.holds(&source.range(), name)?;
        source.file.unchanged()?;
    }
    Ok(())
}

/// What goes through one staging slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Chunk {
    pieces: Vec<Part>,
}

/// A part of a packed tensor, and where it lies in the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    tensor: usize,
    /// Bytes of the packed tensor.
    range: Range<u64>,
    at: u64,
}

/// Cuts tensors into chunks of at most `slot_bytes`: small tensors share one, large ones are
/// cut at whole rows (row blocks), or inside a row that is larger than a slot.
fn cut(tensors: &[Packing], slot_bytes: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let (mut chunk, mut used) = (Chunk::default(), 0u64);
    for (tensor, packing) in tensors.iter().enumerate() {
        let total = packing.bytes();
        let rows = packing.row_bytes() * u64::from(packing.rows_of_unit());
        let unit = packing.unit_bytes();
        assert!(unit <= slot_bytes, "a slot of {slot_bytes} bytes holds {unit}");
        let grain = if rows <= slot_bytes { rows } else { unit };
        let mut done = 0;
        while done < total {
            let at = used.next_multiple_of(SLOT_ALIGNMENT).min(slot_bytes);
            let room = slot_bytes - at;
            let bytes = if total - done <= room { total - done } else { room / grain * grain };
            if bytes == 0 {
                chunks.push(std::mem::take(&mut chunk));
                used = 0;
                continue;
            }
            chunk.pieces.push(Part { tensor, range: done..done + bytes, at });
            done += bytes;
            used = at + bytes;
        }
    }
    if !chunk.pieces.is_empty() {
        chunks.push(chunk);
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packing(rows: u32, cols: u32, fragments: bool, format: Format) -> Packing {
        let layout = if fragments { Layout::Fragments } else { Layout::RowMajor { columns_multiple: 1 } };
        Packing { rows, cols, layout, format }
    }

    #[test]
    fn small_tensors_share_a_slot_and_large_ones_are_cut_at_rows() {
        let tensors = [
            packing(1, 100, false, Format::F32),
            packing(1, 100, false, Format::F32),
            packing(10, 512, false, Format::Bf16),
        ];
        let chunks = cut(&tensors, 4096);
        let part = |tensor, range, at| Part { tensor, range, at };
        assert_eq!(
            chunks,
            [
                Chunk { pieces: vec![part(0, 0..400, 0), part(1, 0..400, 448), part(2, 0..3072, 896)] },
                Chunk { pieces: vec![part(2, 3072..7168, 0)] },
                Chunk { pieces: vec![part(2, 7168..10240, 0)] },
            ]
        );
    }

    proptest! {
        /// Every byte of every tensor is in exactly one part, parts are whole units and do not
        /// overlap in their slot.
        #[test]
        fn cuts_cover_everything_once(
            shapes in prop::collection::vec((1u32..70, 1u32..2000, any::<bool>(), any::<bool>()), 1..6),
            slot in 1024u64..20_000,
        ) {
            let tensors: Vec<Packing> = shapes
                .iter()
                .map(|(r, c, fragments, wide)| {
                    let format = if *wide && !fragments { Format::F32 } else { Format::Bf16 };
                    packing(*r, *c, *fragments, format)
                })
                .collect();
            let mut covered = vec![0u64; tensors.len()];
            for chunk in cut(&tensors, slot) {
                let mut free_from = 0;
                prop_assert!(!chunk.pieces.is_empty());
                for part in chunk.pieces {
                    let bytes = part.range.end - part.range.start;
                    prop_assert!(bytes > 0 && bytes % tensors[part.tensor].unit_bytes() == 0);
                    prop_assert!(part.at >= free_from && part.at + bytes <= slot);
                    prop_assert_eq!(covered[part.tensor], part.range.start);
                    covered[part.tensor] = part.range.end;
                    free_from = part.at + bytes;
                }
            }
            let sizes: Vec<u64> = tensors.iter().map(Packing::bytes).collect();
            prop_assert_eq!(covered, sizes);
        }
    }

    #[test]
    fn a_core_is_left_alone_where_there_are_many() {
        let workers: Vec<usize> = [1, 2, 4, 7, 8, 12, 16, 18, 64].map(workers_for).into();
        assert_eq!(workers, [1, 2, 4, 7, 7, 11, 14, 16, 16]);
    }

    #[test]
    fn a_part_needs_only_the_rows_in_it() {
        let fragments = packing(64, 32, true, Format::Bf16);
        assert_eq!(packed_rows(&fragments, &(1024..2048)), 16..32);
        let rows = packing(64, 32, false, Format::Bf16);
        assert_eq!(packed_rows(&rows, &(64..130)), 1..3);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0; 8]).unwrap();
        let file = Arc::new(WeightFile::open(file.path()).unwrap());
        // Every second packed row from 1: 1, 3, 5, …, 19.
        let source =
            Source { file, offset: 0, rows: 10, cols: 1, format: Format::Bf16, first_row: 1, row_step: 2, plus: 0.0 };
        assert_eq!(source_rows(&source, &(0..1)), 0..0);
        assert_eq!(source_rows(&source, &(0..2)), 0..1);
        assert_eq!(source_rows(&source, &(2..6)), 1..3);
        assert_eq!(source_rows(&source, &(16..64)), 8..10);
    }
}
