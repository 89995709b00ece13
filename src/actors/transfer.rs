//! Owns the transfer queue: copies staged bytes into buffers, fills buffers and reads them back. Messages that wait at
//! the same time share a submission. Not here: allocation after the start, producing the bytes. The actor never blocks
//! on the device while it could submit something.

use super::gpu_clock::GpuClock;
use super::mailbox::{ActorEnded, Address, Mailbox, mailbox};
use super::timeline::TransferRecord;
use super::watcher::OnPanic;
use crate::actors::thread::{ActorThread, SpawnError};
use crate::device::{Batch, Commands, Device, DeviceError, Encoder, Point, Queries, Role};
use crate::memory::{Arena, Buffer, HostSlice, MemoryError, Place, StagingRing, StagingSlot};
use crate::telemetry::clock::Moment;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Capacity of the inbox. Each copy holds a staging slot, so all copies of a ring and as many small messages fit. A
/// sender that finds the inbox full is ahead of the device and has to wait.
const INBOX: usize = 64;
/// The maximum number of messages per submission: enough to make the cost of a submission negligible, few enough that
/// the first message's point is reached soon.
const BATCH: usize = 16;
/// The size of the host memory for readbacks; a larger readback is split into parts.
const READBACK_BYTES: usize = 4 << 20;
/// Polling interval of the timeline while a readback is in progress.
const READBACK_POLL: Duration = Duration::from_micros(50);
/// Polling interval of the timeline while only finished submissions remain to be released.
const COLLECT_POLL: Duration = Duration::from_millis(2);

/// The number of records of finished submissions that are kept.
const RECORDS: usize = 512;
/// The number of submissions in flight that can have timestamps; further ones are not timed.
const STAMPS: u32 = 64;

/// A part of a staging slot and its destination.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Offset of the first byte in the slot.
    pub from: u64,
    /// Destination buffer.
    pub to: Arc<Buffer>,
    /// Offset of the first byte in the destination.
    pub to_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Errors of a transfer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferError {
    /// The device layer failed.
    #[error("the transfer queue failed")]
    Device(#[source] Arc<DeviceError>),
    /// No staging slot became free.
    #[error("no staging memory for a transfer")]
    Staging(#[source] Arc<MemoryError>),
    /// The actor has ended; an earlier error in the log says why.
    #[error("the transfer actor has ended")]
    Ended,
}

/// Receives the point of a transfer when it has been submitted, or the error. The caller must provide a channel with
/// room; a reply to a full channel is dropped.
pub type Submitted = Sender<Result<Point, TransferError>>;

/// Totals since the actor's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferCounters {
    /// Calls of `vkQueueSubmit2`.
    pub submits: u64,
    /// Copy commands, readbacks included.
    pub copies: u64,
    /// Bytes copied by them.
    pub bytes: u64,
    /// Barriers between commands.
    pub barriers: u64,
}

#[derive(Debug, Default)]
struct Counters {
    submits: AtomicU64,
    copies: AtomicU64,
    bytes: AtomicU64,
    barriers: AtomicU64,
}

/// Handle of a device's transfer actor. Transfers take effect in request order.
#[derive(Debug)]
pub struct Transfer {
    // Field order matters: the inbox must close before the thread is joined.
    inbox: Address<Message>,
    _thread: ActorThread,
    counters: Arc<Counters>,
}

#[derive(Debug)]
enum Message {
    Copy {
        slot: StagingSlot,
        pieces: Vec<Piece>,
        waits: Vec<Point>,
        submitted: Submitted,
    },
    Fill {
        to: Arc<Buffer>,
        offset: u64,
        bytes: u64,
        word: u32,
        waits: Vec<Point>,
        submitted: Submitted,
    },
    Readback {
        from: Arc<Buffer>,
        offset: u64,
        bytes: u64,
        waits: Vec<Point>,
        reply: Sender<Result<Vec<u8>, TransferError>>,
    },
    /// Asks for the records of finished submissions.
    Records {
        from: u64,
        reply: Sender<Vec<TransferRecord>>,
    },
}

impl Transfer {
    /// Allocates the readback memory from the arena and starts the thread.
    pub fn spawn(arena: &Arena) -> Result<Transfer, SpawnError> {
        let (_, mut slices) = arena.sliced("readback", READBACK_BYTES, 1, Place::Readback)?;
        let readback = slices.pop().expect("asked for one");
        let (address, inbox) = mailbox(INBOX);
        let counters = Arc::new(Counters::default());
        let actor = Actor {
            device: Arc::clone(arena.device()),
            readback,
            reading: VecDeque::new(),
            under_way: None,
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            hazards: Hazards::default(),
            counters: Arc::clone(&counters),
            clock: GpuClock::of(arena.device()),
            stamps: Stamps::new(arena.device())?,
            records: VecDeque::new(),
            number: 0,
        };
        let thread = ActorThread::spawn("transfer", move || {
            let _lost = OnPanic(Arc::clone(&actor.device));
            actor.run(&inbox);
        })?;
        Ok(Transfer { inbox: address, _thread: thread, counters })
    }

    /// Copies parts of a slot after `waits`, and after earlier uses of the destinations by the compute queue. The slot
    /// returns to its ring automatically. Blocks while the inbox is full.
    ///
    /// # Panics
    /// If a piece is outside its slot or its destination, which is a bug of the caller.
    pub fn copy(
        &self,
        slot: StagingSlot,
        pieces: Vec<Piece>,
        waits: Vec<Point>,
        submitted: Submitted,
    ) -> Result<(), TransferError> {
        for piece in &pieces {
            assert!(within(piece.from, piece.bytes, slot.len() as u64), "{piece:?} of a slot of {}", slot.len());
            assert!(within(piece.to_offset, piece.bytes, piece.to.bytes()), "{piece:?} outside its target");
        }
        self.send(Message::Copy { slot, pieces, waits, submitted })
    }

    /// Fills a range (offset and length are multiples of 4) with a 32-bit word, ordered like a copy.
    ///
    /// # Panics
    /// If the range is outside the buffer or unaligned, which is a bug of the caller.
    pub fn fill(
        &self,
        to: Arc<Buffer>,
        offset: u64,
        bytes: u64,
        word: u32,
        waits: Vec<Point>,
        submitted: Submitted,
    ) -> Result<(), TransferError> {
        assert!(within(offset, bytes, to.bytes()), "{bytes} bytes at {offset} of {to:?}");
        assert!(offset.is_multiple_of(4) && bytes.is_multiple_of(4), "{bytes} bytes at {offset} are not whole words");
        self.send(Message::Fill { to, offset, bytes, word, waits, submitted })
    }

    /// Reads a range after `waits` and after everything submitted so far that writes the buffer. A range larger than
    /// the actor's readback memory is read in parts; it must not be written meanwhile.
    ///
    /// # Panics
    /// If the range is outside the buffer, which is a bug of the caller.
    pub fn readback(
        &self,
        from: Arc<Buffer>,
        offset: u64,
        bytes: u64,
        waits: Vec<Point>,
    ) -> Result<Receiver<Result<Vec<u8>, TransferError>>, TransferError> {
        assert!(within(offset, bytes, from.bytes()), "{bytes} bytes at {offset} of {from:?}");
        let (reply, receiver) = bounded(1);
        self.send(Message::Readback { from, offset, bytes, waits, reply })?;
        Ok(receiver)
    }

    /// Reads a range and waits for the bytes.
    pub fn read(&self, from: &Arc<Buffer>, offset: u64, bytes: u64) -> Result<Vec<u8>, TransferError> {
        let receiver = self.readback(Arc::clone(from), offset, bytes, Vec::new())?;
        receiver.recv().map_err(|_| TransferError::Ended)?
    }

    /// Fills a whole buffer with zeros. Returns the point at which that is complete.
    pub fn clear(&self, to: &Arc<Buffer>) -> Result<Point, TransferError> {
        let (submitted, receiver) = bounded(1);
        // The arena rounds sizes up, so the last word is inside the buffer's memory.
        let bytes = to.bytes().next_multiple_of(4);
        let waits = Vec::new();
        self.send(Message::Fill { to: Arc::clone(to), offset: 0, bytes, word: 0, waits, submitted })?;
        receiver.recv().map_err(|_| TransferError::Ended)?
    }

    /// Copies bytes into a buffer through the staging ring. Returns the point at which they are in the buffer.
    pub fn upload(
        &self,
        ring: &StagingRing,
        to: &Arc<Buffer>,
        offset: u64,
        data: &[u8],
    ) -> Result<Point, TransferError> {
        // With no data the upload is complete at once: value 0 counts as reached.
        let mut last = Point { role: Role::Transfer, value: 0 };
        let mut at = offset;
        for part in data.chunks(ring.slot_bytes()) {
            let mut slot = ring.acquire().map_err(|e| TransferError::Staging(Arc::new(e)))?;
            slot.bytes_mut()[..part.len()].copy_from_slice(part);
            let (submitted, receiver) = bounded(1);
            let bytes = part.len() as u64;
            let piece = Piece { from: 0, to: Arc::clone(to), to_offset: at, bytes };
            self.copy(slot, vec![piece], Vec::new(), submitted)?;
            last = receiver.recv().map_err(|_| TransferError::Ended)??;
            at += bytes;
        }
        Ok(last)
    }

    /// Returns the kept records of finished submissions with a number of at least `number`, oldest first.
    pub fn records(&self, number: u64) -> Vec<TransferRecord> {
        let (reply, answer) = bounded(1);
        match self.send(Message::Records { from: number, reply }) {
            Ok(()) => answer.recv().unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }

    /// Returns the totals since the actor's start.
    pub fn counters(&self) -> TransferCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TransferCounters {
            submits: read(&self.counters.submits),
            copies: read(&self.counters.copies),
            bytes: read(&self.counters.bytes),
            barriers: read(&self.counters.barriers),
        }
    }

    fn send(&self, message: Message) -> Result<(), TransferError> {
        self.inbox.send(message).map_err(|ActorEnded| TransferError::Ended)
    }
}

fn within(offset: u64, bytes: u64, all: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= all)
}

enum Event {
    Message(Message),
    /// A submission in flight may have finished.
    Progress,
    Closed,
}

struct Actor {
    device: Arc<Device>,
    /// The host memory that readbacks copy into; it holds one part at a time.
    readback: HostSlice,
    /// Readbacks in request order; the first may be in progress.
    reading: VecDeque<Reading>,
    /// The part of the first readback that is in progress: the point at which it has been copied, and its length in
    /// bytes.
    under_way: Option<(Point, u64)>,
    in_flight: VecDeque<InFlight>,
    /// Command buffers that the device no longer uses.
    spare: Vec<Commands>,
    hazards: Hazards,
    counters: Arc<Counters>,
    clock: GpuClock,
    stamps: Option<Stamps>,
    /// Records of finished submissions, at most `RECORDS`, and the number of the next one.
    records: VecDeque<TransferRecord>,
    number: u64,
}

/// A submission that has not finished. It keeps the resources alive that the submission uses.
struct InFlight {
    point: Point,
    commands: Commands,
    _buffers: Vec<Arc<Buffer>>,
    what: &'static str,
    bytes: u64,
    copies: u32,
    enqueue: (Moment, Moment),
    waits: Vec<Point>,
    /// Its pair of timestamps.
    stamp: Option<u32>,
}

/// Pairs of timestamps for submissions. Each submission takes a free pair when its command buffer is recorded.
struct Stamps {
    queries: Queries,
    free: Vec<u32>,
}

impl Stamps {
    /// Creates the pairs; `None` if the transfer queue has no timestamps.
    fn new(device: &Device) -> Result<Option<Stamps>, DeviceError> {
        if device.timestamp_bits(Role::Transfer) == 0 {
            return Ok(None);
        }
        match Queries::new(device, 2 * STAMPS) {
            Ok(queries) => Ok(Some(Stamps { queries, free: (0..STAMPS).collect() })),
            Err(DeviceError::Unsupported { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the pair of a finished submission in nanoseconds and frees the pair.
    fn take(&mut self, pair: u32) -> Option<(u64, u64)> {
        let times = self.queries.read(2 * pair, 2);
        self.queries.reset_range(2 * pair, 2);
        self.free.push(pair);
        match times.ok()?[..] {
            [Some(begin), Some(end)] => Some((begin, end)),
            _ => None,
        }
    }
}

/// Records the commands of `record` between a pair of timestamps, if one is free. Returns the command buffer and the
/// pair.
fn record_timed(
    stamps: &mut Option<Stamps>,
    spare: Option<Commands>,
    device: &Device,
    record: impl FnOnce(&mut Encoder),
) -> Result<(Commands, Option<u32>), DeviceError> {
    let pair = stamps.as_mut().and_then(|stamps| stamps.free.pop());
    let recorded = record_in(spare, device, |encoder| {
        let stamp = |encoder: &mut Encoder, index: u32| {
            if let (Some(stamps), Some(pair)) = (&*stamps, pair) {
                encoder.timestamp(&stamps.queries, 2 * pair + index);
            }
        };
        stamp(encoder, 0);
        record(encoder);
        stamp(encoder, 1);
    });
    if recorded.is_err()
        && let (Some(stamps), Some(pair)) = (stamps, pair)
    {
        stamps.free.push(pair);
    }
    Ok((recorded?, pair))
}

struct Reading {
    from: Arc<Buffer>,
    offset: u64,
    bytes: u64,
    waits: Vec<Point>,
    data: Vec<u8>,
    reply: Sender<Result<Vec<u8>, TransferError>>,
}

/// Messages that share a submission, and the points that it waits for.
#[derive(Default)]
struct Group {
    waits: Vec<Point>,
    messages: Vec<Message>,
}

impl Actor {
    fn run(mut self, inbox: &Mailbox<Message>) {
        loop {
            let done = match self.next_event(inbox) {
                Event::Message(message) => {
                    // Messages that are already waiting join this one.
                    let more = inbox.try_iter().take(BATCH - 1);
                    let messages: Vec<Message> = std::iter::once(message).chain(more).collect();
                    self.take(messages)
                }
                Event::Progress => Ok(()),
                Event::Closed => return,
            };
            if let Err(error) = done.and_then(|()| self.progress()) {
                // Callers that wait for an answer see their channel close. Without this actor nothing can be loaded
                // onto the device any more, so it is declared lost and reopened as a new device.
                tracing::error!(error = &error as &dyn std::error::Error, "the transfer actor ends");
                self.device.declare_lost("its transfer actor, which has ended");
                return;
            }
        }
    }

    fn next_event(&self, inbox: &Mailbox<Message>) -> Event {
        let poll = match (&self.under_way, self.in_flight.is_empty()) {
            (Some(_), _) => READBACK_POLL,
            (None, false) => COLLECT_POLL,
            (None, true) => return inbox.recv().map_or(Event::Closed, Event::Message),
        };
        match inbox.recv_timeout(poll) {
            Ok(message) => Event::Message(message),
            Err(RecvTimeoutError::Timeout) => Event::Progress,
            // Callers may still wait for readbacks in progress, so these are finished first.
            Err(RecvTimeoutError::Disconnected) if self.under_way.is_some() => {
                std::thread::sleep(READBACK_POLL);
                Event::Progress
            }
            Err(RecvTimeoutError::Disconnected) => Event::Closed,
        }
    }

    /// Submits copies and fills and queues readbacks, in order.
    fn take(&mut self, messages: Vec<Message>) -> Result<(), DeviceError> {
        let mut group = Group::default();
        for message in messages {
            if let Message::Records { from, reply } = message {
                // The caller may be gone.
                let _ = reply.try_send(self.records.iter().filter(|record| record.number >= from).cloned().collect());
                continue;
            }
            if let Message::Readback { from, offset, bytes, waits, reply } = message {
                self.submit(std::mem::take(&mut group))?;
                let data = Vec::with_capacity(bytes as usize);
                self.reading.push_back(Reading { from, offset, bytes, waits, data, reply });
                self.read_next_part()?;
                continue;
            }
            let waits = message.waits();
            if !joins(&group.waits, &waits) {
                self.submit(std::mem::take(&mut group))?;
            }
            if group.messages.is_empty() {
                group.waits = waits;
            }
            group.messages.push(message);
        }
        self.submit(group)
    }

    /// Makes one submission and answers each message with its point or the error.
    fn submit(&mut self, group: Group) -> Result<(), DeviceError> {
        if group.messages.is_empty() {
            return Ok(());
        }
        let begin = Moment::now();
        let Group { waits, mut messages } = group;
        let before = (self.counters.bytes.load(Ordering::Relaxed), self.counters.copies.load(Ordering::Relaxed));
        let (hazards, counters) = (&mut self.hazards, &self.counters);
        let record = |encoder: &mut Encoder| {
            for message in &messages {
                message.encode(encoder, hazards, counters);
            }
        };
        let recorded = record_timed(&mut self.stamps, self.spare.pop(), &self.device, record);
        let submitted = recorded.and_then(|(commands, stamp)| {
            let batch = Batch::one(commands.clone(), waits.clone());
            match self.device.queue(Role::Transfer).submit(batch) {
                Ok(point) => Ok((point, commands, stamp)),
                Err(error) => {
                    if let (Some(stamps), Some(pair)) = (&mut self.stamps, stamp) {
                        stamps.free.push(pair);
                    }
                    Err(error)
                }
            }
        });
        let (point, commands, stamp) = match submitted {
            Ok(submitted) => submitted,
            Err(error) => {
                // The recorded commands never run, and neither do their barriers.
                self.hazards.forget();
                let error = TransferError::Device(Arc::new(error));
                for message in messages {
                    message.refuse(&error);
                }
                return self.alive();
            }
        };
        self.counters.submits.fetch_add(1, Ordering::Relaxed);
        let mut buffers = Vec::new();
        let (mut filled, mut fills) = (0, 0);
        for message in &mut messages {
            match message {
                Message::Copy { slot, pieces, submitted, .. } => {
                    slot.busy_until(point);
                    buffers.push(Arc::clone(slot.buffer()));
                    for piece in pieces.drain(..) {
                        piece.to.mark_written(point);
                        buffers.push(piece.to);
                    }
                    let _ = submitted.try_send(Ok(point));
                }
                Message::Fill { to, bytes, submitted, .. } => {
                    (filled, fills) = (filled + *bytes, fills + 1);
                    to.mark_written(point);
                    buffers.push(Arc::clone(to));
                    let _ = submitted.try_send(Ok(point));
                }
                Message::Readback { .. } | Message::Records { .. } => unreachable!("these are in no group"),
            }
        }
        buffers.dedup_by(|a, b| Arc::ptr_eq(a, b));
        let (bytes, copies) = (&self.counters.bytes, &self.counters.copies);
        let bytes = bytes.load(Ordering::Relaxed) - before.0 + filled;
        let copies = (copies.load(Ordering::Relaxed) - before.1) as u32 + fills;
        let enqueue = (begin, Moment::now());
        let what = "copy";
        self.in_flight.push_back(InFlight {
            point,
            commands,
            _buffers: buffers,
            what,
            bytes,
            copies,
            enqueue,
            waits,
            stamp,
        });
        Ok(())
    }

    /// Delivers readbacks that have arrived and releases finished submissions.
    fn progress(&mut self) -> Result<(), DeviceError> {
        if self.in_flight.is_empty() {
            return Ok(());
        }
        let reached = self.device.progress(Role::Transfer)?;
        if let Some((point, bytes)) = self.under_way
            && point.value <= reached
        {
            self.under_way = None;
            let reading = self.reading.front_mut().expect("the first is the one under way");
            reading.data.extend_from_slice(&self.readback.bytes()[..bytes as usize]);
            if reading.data.len() as u64 == reading.bytes {
                let done = self.reading.pop_front().expect("looked at above");
                // The caller may be gone.
                let _ = done.reply.try_send(Ok(done.data));
            }
            self.read_next_part()?;
        }
        if self.in_flight.front().is_some_and(|f| f.point.value <= reached) {
            // The queue must release its own references to the command buffers first.
            self.device.queue(Role::Transfer).collect()?;
            while self.in_flight.front().is_some_and(|f| f.point.value <= reached) {
                let finished = self.in_flight.pop_front().expect("looked at above");
                self.note(&finished);
                if self.spare.len() < BATCH {
                    self.spare.push(finished.commands);
                }
            }
        }
        Ok(())
    }

    /// Keeps the record of a finished submission.
    fn note(&mut self, finished: &InFlight) {
        let seen = Moment::now();
        let times = finished.stamp.and_then(|pair| self.stamps.as_mut()?.take(pair));
        if let Some(times) = times {
            self.clock.follow(&self.device, times, (finished.enqueue.0, seen));
        }
        let device = times.and_then(|(begin, end)| Some((self.clock.place(begin)?, self.clock.place(end)?)));
        if self.records.len() == RECORDS {
            self.records.pop_front();
        }
        self.records.push_back(TransferRecord {
            number: self.number,
            what: finished.what,
            bytes: finished.bytes,
            copies: finished.copies,
            enqueue: finished.enqueue,
            device,
            clock: times.and_then(|(_, end)| self.clock.quality(end)),
            seen,
            point: finished.point,
            waits: finished.waits.clone(),
        });
        self.number += 1;
    }

    /// Submits the next part of the first readback, if none is in progress.
    fn read_next_part(&mut self) -> Result<(), DeviceError> {
        while self.under_way.is_none()
            && let Some(reading) = self.reading.front()
        {
            let done = reading.data.len() as u64;
            let bytes = (reading.bytes - done).min(self.readback.len() as u64);
            if bytes == 0 {
                let empty = self.reading.pop_front().expect("looked at above");
                let _ = empty.reply.try_send(Ok(empty.data));
                continue;
            }
            let (from, offset) = (Arc::clone(&reading.from), reading.offset + done);
            let waits = latest(reading.waits.iter().copied().chain(from.last_write()));
            match self.submit_read(&from, offset, bytes, waits) {
                Ok(under_way) => self.under_way = Some(under_way),
                Err(error) => {
                    self.hazards.forget();
                    let failed = self.reading.pop_front().expect("looked at above");
                    let _ = failed.reply.try_send(Err(TransferError::Device(Arc::new(error))));
                    self.alive()?;
                }
            }
        }
        Ok(())
    }

    fn submit_read(
        &mut self,
        from: &Arc<Buffer>,
        offset: u64,
        bytes: u64,
        waits: Vec<Point>,
    ) -> Result<(Point, u64), DeviceError> {
        let begin = Moment::now();
        let into = Arc::clone(self.readback.buffer());
        let into_offset = self.readback.offset();
        let (hazards, counters) = (&mut self.hazards, &self.counters);
        let (commands, stamp) = record_timed(&mut self.stamps, self.spare.pop(), &self.device, |encoder| {
            copy(encoder, hazards, counters, (from, offset), (&into, into_offset), bytes);
            encoder.barrier_host();
        })?;
        let batch = Batch::one(commands.clone(), waits.clone());
        let point = self.device.queue(Role::Transfer).submit(batch)?;
        self.counters.submits.fetch_add(1, Ordering::Relaxed);
        from.mark_read(point);
        into.mark_written(point);
        self.in_flight.push_back(InFlight {
            point,
            commands,
            _buffers: vec![Arc::clone(from), into],
            what: "readback",
            bytes,
            copies: 1,
            enqueue: (begin, Moment::now()),
            waits,
            stamp,
        });
        Ok((point, bytes))
    }

    /// Returns an error if the device is lost. Other failures affect only the message that caused them.
    fn alive(&self) -> Result<(), DeviceError> {
        self.device.progress(Role::Transfer).map(|_| ())
    }
}

impl Message {
    /// Answers the message with an error.
    fn refuse(self, error: &TransferError) {
        // If the reply channel is full or closed, the reply is dropped.
        match self {
            Message::Copy { submitted, .. } | Message::Fill { submitted, .. } => {
                let _ = submitted.try_send(Err(error.clone()));
            }
            Message::Readback { reply, .. } => {
                let _ = reply.try_send(Err(error.clone()));
            }
            Message::Records { .. } => {}
        }
    }

    /// The points that this message waits for: those it names, and the last uses of its destinations by the compute
    /// queue. Uses by the transfer queue itself are ordered by barriers.
    fn waits(&self) -> Vec<Point> {
        let (waits, targets): (&[Point], Vec<&Arc<Buffer>>) = match self {
            Message::Copy { pieces, waits, .. } => (waits, pieces.iter().map(|p| &p.to).collect()),
            Message::Fill { to, waits, .. } => (waits, vec![to]),
            Message::Readback { waits, .. } => (waits, Vec::new()),
            Message::Records { .. } => (&[], Vec::new()),
        };
        let of_compute = |target: &Arc<Buffer>| target.last_use().find(|p| p.role == Role::Compute);
        latest(waits.iter().copied().chain(targets.into_iter().filter_map(of_compute)))
    }

    fn encode(&self, encoder: &mut Encoder, hazards: &mut Hazards, counters: &Counters) {
        match self {
            Message::Copy { slot, pieces, .. } => {
                for piece in pieces {
                    let from = (slot.buffer(), slot.offset() + piece.from);
                    copy(encoder, hazards, counters, from, (&piece.to, piece.to_offset), piece.bytes);
                }
            }
            Message::Fill { to, offset, bytes, word, .. } => {
                if hazards.touch(&[Touch::new(to, *offset, *bytes, true)]) {
                    encoder.barrier_full();
                    counters.barriers.fetch_add(1, Ordering::Relaxed);
                }
                encoder.fill(to.raw(), *offset, *bytes, *word);
            }
            Message::Readback { .. } | Message::Records { .. } => unreachable!("these are in no group"),
        }
    }
}

/// Encodes one copy command, with a barrier before it if needed.
fn copy(
    encoder: &mut Encoder,
    hazards: &mut Hazards,
    counters: &Counters,
    (from, from_offset): (&Arc<Buffer>, u64),
    (to, to_offset): (&Arc<Buffer>, u64),
    bytes: u64,
) {
    let reads = Touch::new(from, from_offset, bytes, false);
    let writes = Touch::new(to, to_offset, bytes, true);
    if hazards.touch(&[reads, writes]) {
        encoder.barrier_full();
        counters.barriers.fetch_add(1, Ordering::Relaxed);
    }
    encoder.copy(from.raw(), from_offset, to.raw(), to_offset, bytes);
    counters.copies.fetch_add(1, Ordering::Relaxed);
    counters.bytes.fetch_add(bytes, Ordering::Relaxed);
}

/// The accesses of this queue's commands since its last barrier, across submissions. Commands on one queue may overlap
/// unless there is a barrier between them.
#[derive(Debug, Default)]
struct Hazards {
    touched: Vec<Touch>,
    /// Set when the tracked accesses may be incomplete; the next command then gets a barrier.
    unknown: bool,
}

/// A range of a buffer that a command reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Touch {
    buffer: u64,
    start: u64,
    end: u64,
    writes: bool,
}

impl Touch {
    fn new(buffer: &Buffer, offset: u64, bytes: u64, writes: bool) -> Touch {
        use ash::vk::Handle;
        Touch { buffer: buffer.raw().as_raw(), start: offset, end: offset + bytes, writes }
    }

    fn conflicts(&self, other: &Touch) -> bool {
        self.buffer == other.buffer && (self.writes || other.writes) && self.start < other.end && other.start < self.end
    }
}

impl Hazards {
    /// The maximum number of tracked accesses, far more than are ever in flight. When it would be exceeded, a barrier
    /// clears them.
    const MOST: usize = 512;

    /// Adds the accesses of the next command. Returns whether a barrier must precede it.
    fn touch(&mut self, now: &[Touch]) -> bool {
        let barrier = self.unknown
            || self.touched.len() + now.len() > Self::MOST
            || now.iter().any(|n| self.touched.iter().any(|t| t.conflicts(n)));
        if barrier {
            self.touched.clear();
            self.unknown = false;
        }
        self.touched.extend_from_slice(now);
        barrier
    }

    /// Called when commands recorded since the last submission, and their barriers, may not have been submitted.
    fn forget(&mut self) {
        self.unknown = true;
    }
}

/// Records into a spare command buffer, or into a new one.
fn record_in(
    spare: Option<Commands>,
    device: &Device,
    record: impl FnOnce(&mut Encoder),
) -> Result<Commands, DeviceError> {
    match spare {
        Some(commands) => commands.record_again(device, Role::Transfer, record),
        None => Commands::record(device, Role::Transfer, record),
    }
}

/// The last point of each queue role among `waits`.
fn latest(waits: impl IntoIterator<Item = Point>) -> Vec<Point> {
    let mut last: [Option<Point>; 2] = [None; 2];
    for point in waits {
        let place = &mut last[point.role.index()];
        if place.is_none_or(|p| p.value < point.value) {
            *place = Some(point);
        }
    }
    last.into_iter().flatten().collect()
}

/// Whether a message with these waits may join a group: it must add no wait, because that would delay the group. Order
/// is kept either way, because the message runs after the group.
fn joins(group: &[Point], waits: &[Point]) -> bool {
    waits.iter().all(|wait| group.iter().any(|w| w.role == wait.role && w.value >= wait.value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(buffer: u64, start: u64, end: u64, writes: bool) -> Touch {
        Touch { buffer, start, end, writes }
    }

    #[test]
    fn a_barrier_stands_before_each_conflict_and_nowhere_else() {
        let mut hazards = Hazards::default();
        // Chunks of one weight copied from different slots.
        assert!(!hazards.touch(&[touch(1, 0, 16, false), touch(9, 0, 16, true)]));
        assert!(!hazards.touch(&[touch(1, 16, 32, false), touch(9, 16, 32, true)]));
        // Reading a slot again is no conflict.
        assert!(!hazards.touch(&[touch(1, 0, 16, false), touch(9, 32, 48, true)]));
        // Read after write.
        assert!(hazards.touch(&[touch(9, 40, 56, false), touch(2, 0, 16, true)]));
        // The barrier above covers the writes before it.
        assert!(!hazards.touch(&[touch(9, 0, 16, true), touch(3, 0, 1, true)]));
        // Write after read since that barrier, then write after write.
        assert!(hazards.touch(&[touch(9, 50, 51, true)]));
        assert!(hazards.touch(&[touch(9, 0, 64, true)]));
        // The same range of another buffer.
        assert!(!hazards.touch(&[touch(8, 0, 64, true)]));
    }

    #[test]
    fn what_is_not_known_gets_a_barrier_once() {
        let mut hazards = Hazards::default();
        hazards.touch(&[touch(1, 0, 4, true)]);
        hazards.forget();
        assert!(hazards.touch(&[touch(2, 0, 4, true)]));
        assert!(!hazards.touch(&[touch(3, 0, 4, true)]));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut hazards = Hazards::default();
        let barriers = (0..2000).filter(|i| hazards.touch(&[touch(1, *i, i + 1, true)])).count();
        assert_eq!(barriers, 3);
        assert!(hazards.touched.len() <= Hazards::MOST);
    }

    #[test]
    fn a_message_joins_only_what_waits_for_as_much() {
        let compute = |value| Point { role: Role::Compute, value };
        let transfer = |value| Point { role: Role::Transfer, value };
        assert!(joins(&[], &[]));
        assert!(joins(&[compute(5)], &[]));
        assert!(joins(&[compute(5)], &[compute(4)]));
        assert!(!joins(&[compute(5)], &[compute(6)]));
        assert!(!joins(&[compute(5)], &[transfer(1)]));
        assert!(!joins(&[], &[compute(1)]));
        assert_eq!(latest([compute(3), transfer(1), compute(7), compute(2)]), [compute(7), transfer(1)]);
    }
}
