//! Owns the loading of weights: reads them from files, packs them on several threads, and passes them to the transfer
//! actor one staging slot at a time; or passes rows as the file has them, which the device packs (`packer`). Not here: the
//! meaning of a tensor, the allocation of device memory, the compute queue.

mod raw;

use self::raw::{RawPart, Segment, copy_rows, cut_raw, segments};
use super::mailbox::{Address, Mailbox, Refused, mailbox};
use super::packer::{DevicePacker, PackerError, RawRows};
use super::transfer::{Piece, Transfer, TransferError};
use crate::actors::thread::{ActorThread, SpawnError};
use crate::device::{DeviceError, Point};
use crate::kernels::pack_codes::PackedRows;
use crate::memory::pack::{BadRow, Format, Layout, Packing, RowMap, Rows, SourceFormat, Transposed, floats, pack};
use crate::memory::plan::HumanBytes;
use crate::memory::{Buffer, MemoryError, StagingRing, WeightFile};
use crate::quant::safetensors::{CodeMatrix, Description, Runs, WeightError, WeightPart};
use crate::telemetry::clock::Moment;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Capacity of the inbox: loads that wait while one runs. Each load takes seconds, so an operator who queues more has
/// made a mistake and gets [`LoadError::Busy`].
const INBOX: usize = 4;
/// Capacity of the progress channel. A report that finds the channel full is dropped; the next one carries newer
/// numbers.
const PROGRESS: usize = 16;
/// Upper bound of packing threads. One thread packs 3.5 to 4.5 GB/s (docs/performance.md), so 16 saturate any
/// host-to-device link.
const MOST_WORKERS: usize = 16;
/// One core in this many is left free for the transfer actor, which has little work but must do it without delay. With
/// as many packing threads as cores, the transfer actor waits for a core while the packing threads wait for staging
/// slots.
const CORES_PER_FREE: usize = 8;
/// Bytes that a worker packs into its own buffer before it copies them into the staging slot with non-temporal stores.
/// Small enough that a tile and its source rows fit in a core's L2 cache, large enough that the cost per copy is
/// negligible.
const TILE: usize = 64 << 10;
/// Niceness of the threads of a load that yields to other work: when such a thread competes with a normal thread for a
/// core, it gets about a tenth of the core.
const NICE: i32 = 10;
/// Packed bytes per band. The source rows of one band are read together where the file is not memory-mapped. A band is
/// a whole number of row units and at least one, even if that is larger, and of the rows of a quantised weight that are
/// read together. A band's source rows and a tile fit in the core's L2 cache, except for wide rows of such weights.
const BAND: u64 = 256 << 10;
/// Alignment of pieces in a staging slot, bytes: a cache line.
const SLOT_ALIGNMENT: u64 = 64;
/// The longest time without progress of the transfer queue while the last submitted copies are waited for.
const DRAIN_WAIT: Duration = Duration::from_secs(60);

/// Describes what to load. Plain data apart from the buffers and files.
#[derive(Clone, Debug, Default)]
pub struct LoadPlan {
    /// The packed tensors, in load order.
    pub tensors: Vec<LoadTensor>,
    /// Packs the rows that it can on the device; without it the host packs all.
    pub packer: Option<Arc<DevicePacker>>,
}

/// One packed tensor, its destination, and the sources of its rows.
#[derive(Clone, Debug)]
pub struct LoadTensor {
    /// Name for error messages.
    pub name: String,
    /// Destination buffer.
    pub target: Arc<Buffer>,
    /// Offset of the tensor's first byte in `target`.
    pub offset: u64,
    /// Size and layout of the packed tensor.
    pub packing: Packing,
    /// Sources of its rows. Packed rows that no source covers become zero.
    pub sources: Vec<TensorSource>,
}

/// Rows of one tensor of a checkpoint, and their destination in a packed tensor.
#[derive(Clone, Debug)]
pub struct TensorSource {
    /// The checkpoint file (shard) that contains the tensor.
    pub file: Arc<WeightFile>,
    /// Offset of the tensor's first byte in `file`, or of the stored matrix whose columns the rows are.
    pub offset: u64,
    /// The rows and their destination.
    pub map: RowMap,
    /// If the stored matrix is the transpose of the tensor: which of its columns are the source's rows. The map's
    /// `stride` is then 1.
    pub transposed: Option<Transposed>,
    /// The quantised weight whose rows these are. The map's `format` is then [`SourceFormat::Canonical`] with the weight's
    /// codes, or numbers in f32, its `stride` is 1, and `offset` is 0.
    pub matrix: Option<MatrixRows>,
}

/// Rows of a quantised weight that is stored in several tensors.
#[derive(Clone, Debug)]
pub struct MatrixRows {
    /// How the weight is stored.
    pub description: Arc<Description>,
    /// The file and the bytes of each tensor, in the order of [`Description::tensors`].
    pub tensors: Arc<[(Arc<WeightFile>, Range<u64>)]>,
    /// The row of the weight that is the source's row 0.
    pub first: u32,
    /// Whether the columns of packed codes are in the order in which the weight is decoded
    /// ([`CodeMatrix::order`]). Numbers are always in the checkpoint's order.
    pub ordered: bool,
}

impl MatrixRows {
    /// The files' bytes of `rows` of `all` rows, as a share of all tensors.
    fn bytes(&self, rows: u32, all: u32) -> u64 {
        let bytes: u64 = self.tensors.iter().map(|(_, range)| range.end - range.start).sum();
        (u128::from(bytes) * u128::from(rows) / u128::from(all.max(1))) as u64
    }
}

impl TensorSource {
    /// The format of the rows that are packed: the file's format, or f32 for columns of quantised blocks, which are
    /// decoded.
    fn row_format(&self) -> SourceFormat {
        match self.map.format {
            SourceFormat::Blocks(_) | SourceFormat::ScaledBlocks(..) if self.transposed.is_some() => {
                SourceFormat::Numbers(Format::F32)
            }
            format => format,
        }
    }

    fn row_bytes(&self) -> u64 {
        self.row_format().row_bytes(self.map.cols)
    }

    /// The bytes of one row of the stored matrix that hold `rows` of the source's rows; for block formats, this is the
    /// whole row.
    fn line(&self, of: Transposed, rows: &Range<u32>) -> Range<u64> {
        match self.map.format == self.row_format() {
            true => {
                let begin = self.map.format.row_bytes(of.first + rows.start);
                begin..begin + self.map.format.row_bytes(rows.len() as u32)
            }
            false => 0..self.map.format.row_bytes(of.width),
        }
    }

    /// The files that the source is read from, each with the bytes that belong to it.
    fn files(&self) -> Vec<(&WeightFile, Range<u64>)> {
        match &self.matrix {
            None => vec![(&self.file, self.range())],
            Some(matrix) => matrix.tensors.iter().map(|(file, range)| (&**file, range.clone())).collect(),
        }
    }

    /// The bytes that are read for the source.
    fn bytes_read(&self) -> u64 {
        match &self.matrix {
            None => match self.transposed {
                Some(of) => {
                    let line = self.line(of, &(0..self.map.rows));
                    u64::from(self.map.cols) * (line.end - line.start)
                }
                None => self.range().end - self.offset,
            },
            Some(matrix) => matrix.bytes(self.map.rows, matrix.description.check().map_or(1, |whole| whole.rows())),
        }
    }

    /// The bytes of the file from the source's first element to its last.
    fn range(&self) -> Range<u64> {
        if let Some(of) = self.transposed {
            let between =
                u64::from(self.map.cols.saturating_sub(1)).saturating_mul(self.map.format.row_bytes(of.width));
            let line = self.line(of, &(0..self.map.rows));
            let begin = self.offset.saturating_add(line.start);
            let end =
                if self.map.rows == 0 { begin } else { self.offset.saturating_add(between).saturating_add(line.end) };
            return begin..end;
        }
        let last = u64::from(self.map.rows.saturating_sub(1)).saturating_mul(u64::from(self.map.stride));
        let rows = if self.map.rows == 0 { 0 } else { last.saturating_add(1) };
        self.offset..self.offset.saturating_add(self.row_bytes().saturating_mul(rows))
    }

    /// The byte range of `rows` in the file, up to the end of the last row. For transposed sources and quantised
    /// weights, which are not stored row by row, the range assumes the order in which rows are packed.
    fn bytes_of(&self, rows: &Range<u32>) -> Range<u64> {
        let at = |row: u32| self.offset + u64::from(row) * u64::from(self.map.stride) * self.row_bytes();
        match rows.is_empty() {
            true => at(rows.start)..at(rows.start),
            false => at(rows.start)..at(rows.end - 1) + self.row_bytes(),
        }
    }
}

/// The progress of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Packed bytes handed to the transfer actor.
    pub bytes_done: u64,
    /// Total packed bytes of the load.
    pub bytes_total: u64,
}

/// Statistics of a finished load.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    /// When the loader started this load.
    pub begin: Moment,
    /// When the last byte was on the device.
    pub end: Moment,
    /// Bytes read from the checkpoint.
    pub bytes_read: u64,
    /// Packed bytes written to the device, padding included.
    pub bytes_written: u64,
    /// Those of them that the device packed.
    pub packed_on_device: u64,
    /// Time from the first validation of the plan until the last byte was on the device.
    pub elapsed: Duration,
    /// Time spent reading files (those not yet in host memory), summed over the workers.
    pub read: Duration,
    /// Time spent packing, summed over the workers.
    pub pack: Duration,
    /// Time spent waiting for free staging slots, that is for copies to finish, summed over the workers.
    pub staging_wait: Duration,
    /// Time from the end of packing to the end of the last copy.
    pub drain: Duration,
    /// One entry per packing thread, with its times.
    pub workers: Vec<WorkerReport>,
    /// The number of chunks; each is copied from one staging slot.
    pub slots: u64,
    /// The number of transfer-queue submissions during the load.
    pub submits: u64,
    /// The transfer point at which all bytes are on the device; already reached when the report is sent. `None` for an
    /// empty plan, and for the loads of several devices.
    pub point: Option<Point>,
}

impl LoadReport {
    /// Joins the reports of loads that ran one after the other, of the stages of a split replica.
    pub fn joined(reports: impl IntoIterator<Item = LoadReport>) -> Option<LoadReport> {
        reports.into_iter().reduce(|all, next| LoadReport {
            begin: all.begin,
            end: next.end,
            bytes_read: all.bytes_read + next.bytes_read,
            bytes_written: all.bytes_written + next.bytes_written,
            packed_on_device: all.packed_on_device + next.packed_on_device,
            elapsed: all.elapsed + next.elapsed,
            read: all.read + next.read,
            pack: all.pack + next.pack,
            staging_wait: all.staging_wait + next.staging_wait,
            drain: all.drain + next.drain,
            workers: [all.workers, next.workers].concat(),
            slots: all.slots + next.slots,
            submits: all.submits + next.submits,
            point: None,
        })
    }
}

/// How one packing thread spent its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerReport {
    /// When the thread started.
    pub begin: Moment,
    /// When the thread found no further chunk.
    pub end: Moment,
    /// Time spent reading files.
    pub read: Duration,
    /// Time spent packing.
    pub pack: Duration,
    /// Time spent waiting for free staging slots, that is for copies to finish.
    pub staging_wait: Duration,
}

impl LoadReport {
    /// Packed gigabytes (10⁹ bytes) per second, over the whole load.
    pub fn gb_per_second(&self) -> f64 {
        self.bytes_written as f64 / 1e9 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

impl fmt::Display for LoadReport {
    /// Writes a line such as `loaded 15.3 GiB in 2.10 s (7.8 GB/s); each of 8 workers read 0.30 s, packed 1.20 s and
    /// waited 0.40 s for staging; last copies 0.02 s`. The times per worker are means. What the device packed follows, with the
    /// rate at which files were read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = |d: Duration| d.as_secs_f64() / self.workers.len().max(1) as f64;
        write!(
            f,
            "loaded {} in {:.2} s ({:.1} GB/s); each of {} workers read {:.2} s, packed {:.2} s and waited {:.2} s \
             for staging; last copies {:.2} s",
            HumanBytes(self.bytes_written),
            self.elapsed.as_secs_f64(),
            self.gb_per_second(),
            self.workers.len(),
            each(self.read),
            each(self.pack),
            each(self.staging_wait),
            self.drain.as_secs_f64(),
        )?;
        if self.packed_on_device > 0 {
            let files = self.bytes_read as f64 / 1e9 / self.elapsed.as_secs_f64().max(1e-9);
            write!(f, "; the device packed {}, files {files:.1} GB/s", HumanBytes(self.packed_on_device))?;
        }
        Ok(())
    }
}

/// Errors of a load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A shard cannot be read, or no staging slot became free.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A copy failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Packing on the device failed.
    #[error(transparent)]
    Packer(Box<PackerError>),
    /// The device found a scale or minimum that is not finite, and the host does not.
    #[error("{name}: the device finds values that are not finite in rows {first} to {last}, the host does not")]
    Unconfirmed {
        /// The packed tensor's name.
        name: String,
        /// The first of the rows.
        first: u32,
        /// The last of the rows.
        last: u32,
    },
    /// A unit of packed rows does not fit in a staging slot.
    #[error("{name}: {bytes} bytes of its rows belong together, a staging slot has {slot}")]
    Unit {
        /// The tensor's name.
        name: String,
        /// The size of the unit.
        bytes: u64,
        /// The size of a slot.
        slot: u64,
    },
    /// The packed tensor does not fit in its target buffer.
    #[error("{name} needs {asked} bytes at {offset} of {buffer:?}, which has {has}")]
    TooLarge {
        /// The tensor's name.
        name: String,
        /// The tensor's packed size, bytes.
        asked: u64,
        /// The tensor's offset in the buffer.
        offset: u64,
        /// The buffer's name.
        buffer: String,
        /// The buffer's size, bytes.
        has: u64,
    },
    /// A source's rows or columns are outside its packed tensor.
    #[error(
        "{name}: a source of {rows} × {cols} from row {first_row} in steps of {row_step} is not inside {packed_rows} × {packed_cols}"
    )]
    Outside {
        /// The tensor's name.
        name: String,
        /// The source's rows.
        rows: u32,
        /// The source's columns.
        cols: u32,
        /// The packed row of the source's row 0.
        first_row: u32,
        /// The source's `row_step`.
        row_step: u32,
        /// The packed tensor's rows.
        packed_rows: u32,
        /// The packed tensor's columns.
        packed_cols: u32,
    },
    /// The layout does not support the number format: fragments need a 2-byte format or codes.
    #[error("{name} cannot be packed as fragments of {format:?}: they need a 2-byte format or codes")]
    NotPackable {
        /// The tensor's name.
        name: String,
        /// The requested format.
        format: Format,
    },
    /// The tensors of a quantised weight do not fit together, or hold values that are not finite.
    #[error("{name}: {source}")]
    Weight {
        /// The packed tensor's name.
        name: String,
        /// The cause.
        source: WeightError,
    },
    /// A quantised row has values that are not finite.
    #[error("{name}: {source}")]
    BadRow {
        /// The packed tensor's name.
        name: String,
        /// The row.
        source: BadRow,
    },
    /// The columns of a quantised weight's groups are not adjacent (act-order), but those of its packed codes are in the
    /// checkpoint's order.
    #[error(
        "{name}: the groups of tensor {tensor} are not of adjacent columns (act-order), as they were when it was opened"
    )]
    ColumnOrder {
        /// The packed tensor's name.
        name: String,
        /// The tensor with the codes.
        tensor: String,
    },
    /// The last copies did not finish: the transfer queue made no progress for the given time.
    #[error("the last copies did not finish in {seconds} s")]
    Stuck {
        /// The time without progress, seconds.
        seconds: u64,
    },
    /// The loader's inbox is full.
    #[error("{waiting} loads are waiting already")]
    Busy {
        /// The number of waiting loads.
        waiting: usize,
    },
    /// A panic during the load, which is a bug. The panic was logged where it happened, and the loader continues with
    /// later loads.
    #[error("a thread that packs has panicked")]
    Panicked,
    /// The load was cancelled or dropped, or the loader was dropped.
    #[error("the load was cancelled")]
    Cancelled,
}

impl From<PackerError> for LoadError {
    fn from(error: PackerError) -> LoadError {
        LoadError::Packer(Box::new(error))
    }
}

/// Handle of a device's loader actor. Dropping it cancels the load in progress.
#[derive(Debug)]
pub struct Loader {
    // Field order matters: the inbox must close before the thread is joined.
    inbox: Address<Message>,
    _thread: ActorThread,
    /// Set once, by `drop`: the load in progress ends before its next chunk.
    closing: Arc<AtomicBool>,
}

/// A requested load. Dropping it cancels the load; bytes already copied stay on the device.
#[derive(Debug)]
pub struct WeightLoad {
    progress: Receiver<LoadProgress>,
    done: Receiver<Result<LoadReport, LoadError>>,
    cancelled: Arc<AtomicBool>,
}

#[derive(Debug)]
enum Message {
    Load {
        plan: LoadPlan,
        workers: Option<usize>,
        cancelled: Arc<AtomicBool>,
        progress: Sender<LoadProgress>,
        done: Sender<Result<LoadReport, LoadError>>,
    },
}

impl Loader {
    /// Starts the loader thread. Loads run on `workers` packing threads; `None` selects the number of cores minus one
    /// in eight (`CORES_PER_FREE`), at most `MOST_WORKERS`.
    pub fn spawn(transfer: Arc<Transfer>, ring: StagingRing, workers: Option<usize>) -> Result<Loader, SpawnError> {
        let (address, inbox) = mailbox(INBOX);
        let closing = Arc::new(AtomicBool::new(false));
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let workers = workers.unwrap_or_else(|| workers_for(cores())).max(1);
        let actor = Actor { transfer, ring, workers, closing: Arc::clone(&closing) };
        let thread = ActorThread::spawn("loader", move || actor.run(&inbox))?;
        Ok(Loader { inbox: address, _thread: thread, closing })
    }

    /// Queues a load behind the loads requested earlier.
    pub fn load(&self, plan: LoadPlan) -> Result<WeightLoad, LoadError> {
        self.load_on(plan, None)
    }

    /// Like [`Loader::load`], but with `Some(n)` on at most `n` threads, which run at low priority (niceness `NICE`), for
    /// loads beside other work.
    pub fn load_on(&self, plan: LoadPlan, workers: Option<usize>) -> Result<WeightLoad, LoadError> {
        let (progress, progress_receiver) = bounded(PROGRESS);
        let (done, done_receiver) = bounded(1);
        let cancelled = Arc::new(AtomicBool::new(false));
        let message = Message::Load { plan, workers, cancelled: Arc::clone(&cancelled), progress, done };
        match self.inbox.try_send(message) {
            Ok(()) => Ok(WeightLoad { progress: progress_receiver, done: done_receiver, cancelled }),
            Err(Refused::Full) => Err(LoadError::Busy { waiting: INBOX }),
            Err(Refused::Ended) => Err(LoadError::Cancelled),
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Before the inbox closes: the load in progress ends early, and then the thread.
        self.closing.store(true, Ordering::Relaxed);
    }
}

impl WeightLoad {
    /// Receives progress reports; the channel closes when the load ends.
    pub fn progress(&self) -> &Receiver<LoadProgress> {
        &self.progress
    }

    /// Receives the one result, for use in a `select!`; otherwise use [`WeightLoad::wait`].
    pub fn done(&self) -> &Receiver<Result<LoadReport, LoadError>> {
        &self.done
    }

    /// Asks the load to end before its next chunk. Its result is then [`LoadError::Cancelled`], unless it had already
    /// ended.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits until the load ends.
    pub fn wait(self) -> Result<LoadReport, LoadError> {
        self.wait_with(|_| ())
    }

    /// Waits until the load ends and calls `say` for each progress report.
    pub fn wait_with(self, mut say: impl FnMut(LoadProgress)) -> Result<LoadReport, LoadError> {
        self.progress.iter().for_each(&mut say);
        // The channel closed without a result, so the loader was dropped.
        self.done.recv().unwrap_or(Err(LoadError::Cancelled))
    }
}

impl Drop for WeightLoad {
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

/// State that the workers of one load share.
struct Shared<'a> {
    plan: &'a LoadPlan,
    chunks: &'a [Work],
    next: AtomicUsize,
    bytes_done: AtomicU64,
    bytes_total: u64,
    /// Set when a worker fails, so that the others stop.
    failed: AtomicBool,
    cancelled: &'a AtomicBool,
    progress: &'a Sender<LoadProgress>,
    submitted: Sender<Result<Point, TransferError>>,
}

impl Shared<'_> {
    /// Reports that packed bytes have been handed to the transfer actor.
    fn advance(&self, bytes: u64) {
        let bytes_done = self.bytes_done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // A full channel drops this report; the next one carries newer numbers.
        let _ = self.progress.try_send(LoadProgress { bytes_done, bytes_total: self.bytes_total });
    }
}

impl Actor {
    fn run(self, inbox: &Mailbox<Message>) {
        while let Ok(Message::Load { plan, workers, cancelled, progress, done }) = inbox.recv() {
            let load = || self.load(&plan, workers, &cancelled, &progress);
            let result = catch_unwind(AssertUnwindSafe(load)).unwrap_or(Err(LoadError::Panicked));
            if let Ok(report) = &result {
                // The progress of the load tells it too.
                tracing::debug!(
                    bytes = report.bytes_written,
                    seconds = report.elapsed.as_secs_f64(),
                    gb_per_second = report.gb_per_second(),
                    "{report}"
                );
            }
            // What a failed load has submitted ends before its buffers are dropped; its error is known already.
            if let Some(packer) = plan.packer.as_ref().filter(|_| result.is_err()) {
                let _ = packer.settle();
            }
            // Drop the plan before the result is sent, so that its buffers are released when the receiver gets it.
            drop(plan);
            drop(progress);
            // The receiver may have been dropped.
            let _ = done.try_send(result);
        }
    }

    fn load(
        &self,
        plan: &LoadPlan,
        workers: Option<usize>,
        cancelled: &AtomicBool,
        progress: &Sender<LoadProgress>,
    ) -> Result<LoadReport, LoadError> {
        let (start, begin) = (Instant::now(), Moment::now());
        for tensor in &plan.tensors {
            check(tensor)?;
        }
        let slot = self.ring.slot_bytes() as u64;
        if let Some(tensor) = plan.tensors.iter().find(|tensor| tensor.packing.unit_bytes() > slot) {
            return Err(LoadError::Unit { name: tensor.name.clone(), bytes: tensor.packing.unit_bytes(), slot });
        }
        let chunks = divide(plan, slot);
        let bytes_total = plan.tensors.iter().map(|tensor| tensor.packing.bytes()).sum();
        let submits_before = self.transfer.counters().submits;
        // One reply per chunk, so sending never blocks.
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
        let results: Vec<Result<WorkerReport, LoadError>> = std::thread::scope(|scope| {
            let spawn = |i: usize| {
                std::thread::Builder::new().name(format!("loader.{i}")).spawn_scoped(scope, || {
                    if gives_way {
                        give_way();
                    }
                    self.work(&shared)
                })
            };
            // Those that the system starts do the work of all; if it starts none, this thread does.
            let threads: Vec<_> = (0..workers).map_while(|i| spawn(i).ok()).collect();
            if threads.is_empty() {
                return vec![self.work(&shared)];
            }
            let joined = threads.into_iter().map(|t| t.join());
            joined.map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        let packed = Instant::now();
        drop(shared);
        let workers: Vec<WorkerReport> = results.into_iter().collect::<Result<_, _>>()?;
        // The transfer actor now has all chunks. It answers each one, or its end closes the channel.
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
        if let Some(packer) = &plan.packer {
            packer.settle()?;
        }
        for source in plan.tensors.iter().flat_map(|t| &t.sources) {
            source.files().into_iter().try_for_each(|(file, _)| file.unchanged())?;
        }
        if let Some(Work::Raw(parts)) =
            plan.packer.as_ref().and_then(|packer| packer.fault()).and_then(|part| chunks.get(part as usize))
        {
            return Err(confirm(plan, parts));
        }
        let sum = |of: fn(&WorkerReport) -> Duration| workers.iter().map(of).sum();
        Ok(LoadReport {
            begin,
            end: Moment::now(),
            bytes_read: plan.tensors.iter().flat_map(|t| &t.sources).map(TensorSource::bytes_read).sum(),
            bytes_written: bytes_total,
            packed_on_device: chunks.iter().map(|chunk| chunk.packed_on_device(plan)).sum(),
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

    /// Packs chunks until none are left or another worker has failed.
    fn work(&self, shared: &Shared<'_>) -> Result<WorkerReport, LoadError> {
        let (now, none) = (Moment::now(), Duration::ZERO);
        let mut spent = WorkerReport { begin: now, end: now, read: none, pack: none, staging_wait: none };
        let mut buffers = Buffers { tile: vec![0; TILE], band: Vec::new(), parts: Vec::new() };
        loop {
            if self.is_cancelled(shared) {
                return Err(LoadError::Cancelled);
            }
            let index = shared.next.fetch_add(1, Ordering::Relaxed);
            if index >= shared.chunks.len() || shared.failed.load(Ordering::Relaxed) {
                spent.end = Moment::now();
                return Ok(spent);
            }
            let done = match (&shared.chunks[index], &shared.plan.packer) {
                (Work::Pack(chunk), _) => self.one(shared, chunk, &mut buffers, &mut spent),
                (Work::Raw(parts), Some(packer)) => self.raw(shared, (index, parts), packer, &mut buffers, &mut spent),
                (Work::Raw(_), None) => unreachable!("rows are packed on the device by a packer"),
            };
            if let Err(error) = done {
                shared.failed.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
    }

    /// Whether the load, or the loader, was dropped or cancelled.
    fn is_cancelled(&self, shared: &Shared<'_>) -> bool {
        [shared.cancelled, &*self.closing].iter().any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Copies rows as the file has them through a staging slot to the device, and has them packed there. Returns without
    /// having done so if the load has ended meanwhile.
    fn raw(
        &self,
        shared: &Shared<'_>,
        (index, parts): (usize, &[RawPart]),
        packer: &DevicePacker,
        buffers: &mut Buffers,
        spent: &mut WorkerReport,
    ) -> Result<(), LoadError> {
        let start = Instant::now();
        let mut slot = self.ring.acquire()?;
        let have_slot = Instant::now();
        let read_before = spent.read;
        let mut rows = Vec::with_capacity(parts.len());
        let mut used = 0;
        for part in parts {
            let tensor = &shared.plan.tensors[part.tensor];
            spent.read += copy_rows(tensor, part, buffers, |offset, bytes| {
                slot.stream((part.at + offset) as usize, bytes);
            })?;
            used = part.at + part.bytes;
            let packed = part.packed(&tensor.packing);
            rows.push(RawRows {
                variant: part.way.variant,
                rows: PackedRows {
                    rows: part.rows.len() as u32,
                    cols: part.way.cols,
                    padded_cols: tensor.packing.padded_cols(),
                    part: index as u32,
                },
                at: part.at,
                bytes: part.bytes,
                target: Arc::clone(&tensor.target),
                offset: tensor.offset + packed.start,
                packed_bytes: packed.end - packed.start,
            });
        }
        let copied = Instant::now();
        let ended = || self.is_cancelled(shared) || shared.failed.load(Ordering::Relaxed);
        let raw = match packer.acquire(ended) {
            Err(PackerError::Ended) => return Ok(()),
            raw => raw?,
        };
        spent.staging_wait += (have_slot - start) + copied.elapsed();
        spent.pack += (copied - have_slot).saturating_sub(spent.read - read_before);
        let piece = Piece { from: 0, to: Arc::clone(packer.raw()), to_offset: raw.offset(), bytes: used };
        let (submitted, reply) = bounded(1);
        self.transfer.copy(slot, vec![piece], Vec::new(), submitted)?;
        let point = reply.recv().map_err(|_| TransferError::Ended)??;
        packer.submit(raw, rows, point)?;
        // There is room for one of each chunk.
        let _ = shared.submitted.try_send(Ok(point));
        let bytes = parts.iter().map(|part| part.packed_bytes(&shared.plan.tensors[part.tensor].packing)).sum();
        shared.advance(bytes);
        Ok(())
    }

    /// Packs one chunk, tile by tile, into a staging slot and hands the slot to the transfer actor.
    fn one(
        &self,
        shared: &Shared<'_>,
        chunk: &Chunk,
        buffers: &mut Buffers,
        spent: &mut WorkerReport,
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
        // The time spent reading is counted separately.
        spent.pack += (packed - have_slot).saturating_sub(spent.read - read_before);
        shared.advance(chunk.pieces.iter().map(|p| p.range.end - p.range.start).sum());
        Ok(())
    }
}

/// Lowers the scheduling priority of the calling thread to niceness `NICE`.
fn give_way() {
    // A failure is harmless: a load of this kind also runs on fewer threads.
    let _ = rustix::process::nice(NICE);
}

/// The default number of packing threads on a machine with `cores` cores.
fn workers_for(cores: usize) -> usize {
    (cores - cores / CORES_PER_FREE).min(MOST_WORKERS)
}

/// A worker's own buffers.
struct Buffers {
    /// Packed bytes before they are copied into the slot.
    tile: Vec<u8>,
    /// Source rows read from files that are not mapped, and rows of quantised weights and of transposed matrices.
    band: Vec<u8>,
    /// Parts of quantised weights, and columns of transposed matrices, in files that are not mapped.
    parts: Vec<u8>,
}

/// A source with the data that its rows are made of.
struct Opened<'a> {
    source: &'a TensorSource,
    data: Data<'a>,
}

/// The data from which the rows of a source are computed.
enum Data<'a> {
    /// The rows themselves, which are read band by band.
    Rows,
    /// A quantised weight, or a part of it.
    Matrix {
        /// The part.
        matrix: Box<CodeMatrix<'a>>,
        /// The weight's row that is the source's row 0.
        first: u32,
        /// The weight's row that is the part's row 0.
        from: u32,
    },
    /// Columns of a stored matrix.
    Columns(Columns<'a>),
}

/// Adjacent columns of a stored matrix, which are the source's rows from `first` on. The columns' part of the matrix'
/// row k begins at byte `k * stride`; for block formats, the slice holds whole rows.
struct Columns<'a> {
    bytes: &'a [u8],
    stride: usize,
    first: u32,
}

impl Columns<'_> {
    /// Writes the source's rows `rows` of `cols` elements of `SIZE` bytes.
    fn transpose<const SIZE: usize>(&self, rows: &Range<u32>, cols: usize, out: &mut [u8]) {
        /// The columns that are written at a time: a cache line of elements of two bytes.
        const STEP: usize = 32;
        let out = out.as_chunks_mut::<SIZE>().0;
        let at = (rows.start - self.first) as usize * SIZE;
        for start in (0..cols).step_by(STEP) {
            for col in start..cols.min(start + STEP) {
                let line = &self.bytes[col * self.stride + at..][..rows.len() * SIZE];
                for (row, x) in line.as_chunks::<SIZE>().0.iter().enumerate() {
                    out[row * cols + col] = *x;
                }
            }
        }
    }

    /// Decodes the source's rows `rows` from rows of blocks and writes their numbers; `of` gives their columns within
    /// those rows.
    fn decode(&self, source: &TensorSource, of: Transposed, rows: &Range<u32>, out: &mut [u8]) -> Result<(), BadRow> {
        let mut line = vec![0.0; of.width as usize];
        let (cols, begin) = (source.map.cols as usize, (of.first + rows.start) as usize);
        let out = out.as_chunks_mut::<4>().0;
        for (col, stored) in self.bytes.chunks_exact(self.stride).take(cols).enumerate() {
            let bad = |group| BadRow { row: source.map.first_row + rows.start * source.map.row_step, group };
            floats(source.map.format, stored, &mut line).map_err(bad)?;
            for (row, x) in line[begin..begin + rows.len()].iter().enumerate() {
                out[row * cols + col] = x.to_le_bytes();
            }
        }
        Ok(())
    }

    fn write(&self, source: &TensorSource, rows: &Range<u32>, out: &mut [u8]) -> Result<(), BadRow> {
        let cols = source.map.cols as usize;
        match source.transposed.filter(|_| source.map.format != source.row_format()) {
            Some(of) => return self.decode(source, of, rows, out),
            None => match source.map.format.row_bytes(1) {
                2 => self.transpose::<2>(rows, cols, out),
                4 => self.transpose::<4>(rows, cols, out),
                size => unreachable!("elements of {size} bytes"),
            },
        }
        Ok(())
    }
}

/// Returns the columns that `rows` of a source are: a slice of the map, or of `room`, which has their size if the file is
/// not mapped, after they were read into it.
fn columns<'a>(
    source: &'a TensorSource,
    of: Transposed,
    rows: &Range<u32>,
    room: &'a mut [u8],
    name: &str,
) -> Result<Columns<'a>, LoadError> {
    let between = source.map.format.row_bytes(of.width);
    let line = source.line(of, rows);
    let (begin, each) = (source.offset + line.start, line.end - line.start);
    if source.file.is_mapped() {
        let end = begin + between * u64::from(source.map.cols.saturating_sub(1)) + each;
        let bytes = source.file.bytes(begin..end, &mut [], name)?;
        return Ok(Columns { bytes, stride: between as usize, first: rows.start });
    }
    for (line, begin) in room.chunks_exact_mut(each as usize).zip((begin..).step_by(between as usize)) {
        source.file.bytes(begin..begin + each, line, name)?;
    }
    Ok(Columns { bytes: room, stride: each as usize, first: rows.start })
}

/// Some rows of a source that are packed.
struct Needed<'a> {
    source: &'a TensorSource,
    rows: Range<u32>,
    /// The part of the quantised weight that has the rows, if it is read instead of mapped.
    part: Option<WeightPart>,
}

impl<'a> Needed<'a> {
    fn new(source: &'a TensorSource, rows: Range<u32>, name: &str) -> Result<Needed<'a>, LoadError> {
        let part = match &source.matrix {
            Some(of) if of.tensors.iter().any(|(file, _)| !file.is_mapped()) => {
                let failed = |source| LoadError::Weight { name: name.to_owned(), source };
                Some(of.description.part(of.first + rows.start..of.first + rows.end).map_err(failed)?)
            }
            _ => None,
        };
        Ok(Needed { source, rows, part })
    }

    /// The bytes that are read before the rows are packed.
    fn bytes_read(&self) -> usize {
        let bytes = match &self.part {
            Some(part) => part.tensors.iter().map(Runs::total).sum(),
            None => match self.source.transposed.filter(|_| !self.source.file.is_mapped()) {
                Some(of) => {
                    let line = self.source.line(of, &self.rows);
                    u64::from(self.source.map.cols) * (line.end - line.start)
                }
                None => 0,
            },
        };
        bytes as usize
    }

    /// Opens the source. What is needed of files that are not mapped is read into `room`, except for plain rows.
    fn open(&'a self, room: &'a mut [u8], name: &str) -> Result<Opened<'a>, LoadError> {
        let source = self.source;
        let data = match (&source.matrix, source.transposed) {
            (None, None) => Data::Rows,
            (None, Some(of)) => Data::Columns(columns(source, of, &self.rows, room, name)?),
            (Some(of), _) => {
                let mut slices = Vec::with_capacity(of.tensors.len());
                let (description, from) = match &self.part {
                    None => {
                        for (file, range) in of.tensors.iter() {
                            slices.push(file.bytes(range.clone(), &mut [], name)?);
                        }
                        (&*of.description, 0)
                    }
                    Some(part) => {
                        let mut room = room;
                        for ((file, range), runs) in of.tensors.iter().zip(&part.tensors) {
                            let (here, rest) = room.split_at_mut(runs.total() as usize);
                            room = rest;
                            read_runs(file, range.start, runs, here, name)?;
                            slices.push(&*here);
                        }
                        (&part.description, part.first)
                    }
                };
                let matrix = Box::new(open(of, description, source.map.format, &slices, name)?);
                Data::Matrix { matrix, first: of.first, from }
            }
        };
        Ok(Opened { source, data })
    }
}

/// Reads runs of a tensor's bytes, which begins at `start` in the file.
fn read_runs(file: &WeightFile, start: u64, runs: &Runs, room: &mut [u8], name: &str) -> Result<(), LoadError> {
    let begins = (0..runs.count).map(|index| start + runs.first + index * runs.stride);
    for (line, begin) in room.chunks_exact_mut(runs.bytes.max(1) as usize).zip(begins) {
        let part = begin..begin + runs.bytes;
        match file.is_mapped() {
            true => line.copy_from_slice(file.bytes(part, &mut [], name)?),
            false => drop(file.bytes(part, line, name)?),
        }
    }
    Ok(())
}

/// Announces the bytes of rows of a source that are read next.
fn announce(opened: &Opened<'_>, rows: &Range<u32>) -> Result<(), LoadError> {
    let source = opened.source;
    let (Data::Matrix { matrix, first, .. }, Some(of)) = (&opened.data, &source.matrix) else {
        source.file.unchanged()?;
        let part = match opened.data {
            // Columns of a file that is not mapped were read already.
            Data::Columns(_) if !source.file.is_mapped() => return Ok(()),
            Data::Columns(_) => source.range(),
            _ => source.bytes_of(rows),
        };
        return Ok(source.file.announce(&part)?);
    };
    // All of a weight in files that are not mapped was read already.
    let is_read = of.tensors.iter().any(|(file, _)| !file.is_mapped());
    for (index, (file, range)) in of.tensors.iter().enumerate() {
        file.unchanged()?;
        let part = (index == 0).then(|| matrix.bytes_of(first + rows.start..first + rows.end)).flatten();
        let part = part.map_or(range.clone(), |part| range.start + part.start..range.start + part.end);
        if !is_read {
            file.announce(&part)?;
        }
    }
    Ok(())
}

/// Decodes rows of a quantised weight into canonical rows, or into numbers in the checkpoint's order.
fn decode(
    matrix: &CodeMatrix<'_>,
    format: SourceFormat,
    rows: Range<u32>,
    mut out: &mut [u8],
) -> Result<(), WeightError> {
    let row_bytes = format.row_bytes(matrix.cols()) as usize;
    let together = matrix.rows_together();
    let mut first = rows.start;
    while first < rows.end {
        let count = rows.end.min((first / together + 1) * together) - first;
        let (here, rest) = out.split_at_mut(count as usize * row_bytes);
        match format {
            SourceFormat::Canonical(_) => matrix.decode_canonical(first, count, here)?,
            _ => write_numbers(matrix, first, count, here)?,
        }
        (first, out) = (first + count, rest);
    }
    Ok(())
}

/// Decodes rows of a quantised weight and writes their numbers in f32, in the checkpoint's order.
fn write_numbers(matrix: &CodeMatrix<'_>, first: u32, count: u32, out: &mut [u8]) -> Result<(), WeightError> {
    let (rows, cols, groups) = (count as usize, matrix.cols() as usize, matrix.groups());
    let (mut codes, mut scales) = (vec![0; rows * cols], vec![0.0; rows * groups]);
    let stored = if matrix.codes().zero().is_none() { groups } else { 0 };
    let mut minimums = vec![0.0; rows * stored];
    matrix.decode(first, count, &mut codes, &mut scales, &mut minimums)?;
    let mut numbers = vec![0.0; cols];
    for (row, out) in out.chunks_exact_mut((4 * cols).max(1)).enumerate() {
        let (codes, scales) = (&codes[row * cols..][..cols], &scales[row * groups..][..groups]);
        matrix.codes().dequantize(codes, scales, &minimums[row * stored..][..stored], &mut numbers);
        let out = out.as_chunks_mut::<4>().0;
        match matrix.order() {
            None => out.iter_mut().zip(&numbers).for_each(|(to, x)| *to = x.to_le_bytes()),
            Some(order) => order.iter().zip(&numbers).for_each(|(col, x)| out[*col as usize] = x.to_le_bytes()),
        }
    }
    Ok(())
}

/// Packs a part of a tensor from its files, band by band, and calls `put` with each tile's offset in the part and its
/// bytes. Returns the time spent reading files.
fn fill(
    tensor: &LoadTensor,
    part: Range<u64>,
    buffers: &mut Buffers,
    mut put: impl FnMut(u64, &[u8]),
) -> Result<Duration, LoadError> {
    let rows = packed_rows(&tensor.packing, &part);
    // A tensor may consist of hundreds of experts; a part has rows of only a few of them.
    let needed = tensor.sources.iter().map(|source| (source, source.map.source_rows(rows.clone())));
    let needed = needed.filter(|(_, of)| !of.is_empty()).map(|(source, of)| Needed::new(source, of, &tensor.name));
    let needed: Vec<Needed<'_>> = needed.collect::<Result<_, LoadError>>()?;
    let started = Instant::now();
    let Buffers { tile, band: rows_read, parts } = buffers;
    let total = needed.iter().map(Needed::bytes_read).sum();
    if parts.len() < total {
        parts.resize(total, 0);
    }
    let mut parts = &mut parts[..total];
    let mut opened = Vec::with_capacity(needed.len());
    for one in &needed {
        let (room, rest) = parts.split_at_mut(one.bytes_read());
        parts = rest;
        let source = one.open(room, &tensor.name)?;
        announce(&source, &one.rows)?;
        opened.push(source);
    }
    let mut read = started.elapsed();
    let stride = tensor.packing.row_bytes() * u64::from(tensor.packing.rows_of_unit());
    // Rows of quantised weights that are read together are of one band.
    let together = opened.iter().filter_map(|one| match &one.data {
        Data::Matrix { matrix, .. } => Some(matrix.rows_together() * one.source.map.row_step),
        _ => None,
    });
    let together = together.max().unwrap_or(1).div_ceil(tensor.packing.rows_of_unit());
    let band = (BAND / stride).max(1).next_multiple_of(together.into()) * stride;
    let mut begin = part.start;
    while begin < part.end {
        let end = part.end.min((begin / band + 1) * band);
        let started = Instant::now();
        let rows = packed_rows(&tensor.packing, &(begin..end));
        let here =
            opened.iter().map(|one| (one, one.source.map.source_rows(rows.clone()))).filter(|(_, of)| !of.is_empty());
        let here: Vec<(&Opened<'_>, Range<u32>)> = here.collect();
        let lengths = here.iter().map(|(one, of)| one.source.bytes_of(of)).map(|bytes| bytes.end - bytes.start);
        let total = lengths.sum::<u64>() as usize;
        if rows_read.len() < total {
            rows_read.resize(total, 0);
        }
        let mut room = &mut rows_read[..total];
        let mut sources = Vec::with_capacity(here.len());
        for (Opened { source, data }, of) in here {
            let bytes = source.bytes_of(&of);
            let (into, rest) = std::mem::take(&mut room).split_at_mut((bytes.end - bytes.start) as usize);
            room = rest;
            let bytes = match data {
                Data::Rows => source.file.bytes(bytes, into, &tensor.name)?,
                Data::Columns(columns) => {
                    let failed = |source| LoadError::BadRow { name: tensor.name.clone(), source };
                    let written = columns.write(source, &of, into);
                    written.map_err(|error| changed(source).unwrap_or_else(|| failed(error)))?;
                    &*into
                }
                Data::Matrix { matrix, first, from } => {
                    let first = first + of.start - from;
                    let failed = |source| LoadError::Weight { name: tensor.name.clone(), source };
                    let decoded = decode(matrix, source.map.format, first..first + of.len() as u32, into);
                    decoded.map_err(|error| changed(source).unwrap_or_else(|| failed(error.in_part_from(*from))))?;
                    &*into
                }
            };
            sources.push(Rows {
                bytes,
                map: RowMap {
                    format: source.row_format(),
                    rows: of.end - of.start,
                    first_row: source.map.first_row + of.start * source.map.row_step,
                    ..source.map
                },
            });
        }
        read += started.elapsed();
        // Whole units: a row of codes may be larger than a tile.
        let unit = tensor.packing.unit_bytes();
        let tile_bytes = (TILE as u64 / unit).max(1) * unit;
        if (tile.len() as u64) < tile_bytes {
            tile.resize(tile_bytes as usize, 0);
        }
        while begin < end {
            let tile_end = end.min(begin + tile_bytes);
            let tile = &mut tile[..(tile_end - begin) as usize];
            let packed = pack(&tensor.packing, &sources, begin..tile_end, tile);
            packed.map_err(|source| {
                let changed = needed.iter().find_map(|one| changed(one.source));
                changed.unwrap_or_else(|| LoadError::BadRow { name: tensor.name.clone(), source })
            })?;
            put(begin - part.start, tile);
            begin = tile_end;
        }
    }
    Ok(read)
}

/// Returns the error that the host finds in rows in which the device has found values that are not finite.
fn confirm(plan: &LoadPlan, parts: &[RawPart]) -> LoadError {
    let mut buffers = Buffers { tile: vec![0; TILE], band: Vec::new(), parts: Vec::new() };
    let found = parts.iter().find_map(|part| {
        let tensor = &plan.tensors[part.tensor];
        fill(tensor, part.packed(&tensor.packing), &mut buffers, |_, _| ()).err()
    });
    found.unwrap_or_else(|| LoadError::Unconfirmed {
        name: parts.first().map_or_else(String::new, |part| plan.tensors[part.tensor].name.clone()),
        first: parts.first().map_or(0, |part| part.rows.start),
        last: parts.last().map_or(0, |part| part.rows.end.saturating_sub(1)),
    })
}

/// Returns an error if the source's file has changed: defects of its data are then a consequence.
fn changed(source: &TensorSource) -> Option<LoadError> {
    source.files().into_iter().find_map(|(file, _)| file.unchanged().err()).map(LoadError::from)
}

/// Opens a quantised weight whose columns are in the order of the packed weight.
fn open<'a>(
    of: &MatrixRows,
    description: &'a Description,
    format: SourceFormat,
    bytes: &[&'a [u8]],
    name: &str,
) -> Result<CodeMatrix<'a>, LoadError> {
    let failed = |source| LoadError::Weight { name: name.to_owned(), source };
    let matrix = description.open(bytes).map_err(failed)?;
    match matrix.order() {
        None => Ok(matrix),
        Some(_) if of.ordered || format.codes().is_none() => Ok(matrix),
        Some(_) => {
            let tensor = of.description.tensors.first().map_or_else(String::new, |tensor| tensor.name.clone());
            Err(LoadError::ColumnOrder { name: name.to_owned(), tensor })
        }
    }
}

/// The packed rows that contain bytes of `part`, rounded to whole row units.
fn packed_rows(packing: &Packing, part: &Range<u64>) -> Range<u32> {
    let rows_at_once = u64::from(packing.rows_of_unit());
    let stride = packing.row_bytes() * rows_at_once;
    let (first, end) = (part.start / stride, part.end.div_ceil(stride));
    (first * rows_at_once) as u32..(end * rows_at_once) as u32
}

/// Validates everything about a tensor that can be checked before it is read.
fn check(tensor: &LoadTensor) -> Result<(), LoadError> {
    let LoadTensor { name, target, offset, packing, sources } = tensor;
    if packing.layout == Layout::Fragments && packing.format == Format::F32 {
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
        let last = u64::from(source.map.first_row)
            + u64::from(source.map.rows.saturating_sub(1)) * u64::from(source.map.row_step);
        let fits = source.map.used_cols <= packing.cols
            && source.map.first_col.checked_add(source.map.used_cols).is_some_and(|end| end <= source.map.cols)
            && source.map.row_step > 0
            && source.map.stride > 0
            && (source.map.rows == 0 || last < u64::from(packing.rows));
        if !fits {
            return Err(LoadError::Outside {
                name: name.clone(),
                rows: source.map.rows,
                cols: source.map.cols,
                first_row: source.map.first_row,
                row_step: source.map.row_step,
                packed_rows: packing.rows,
                packed_cols: packing.cols,
            });
        }
        for (file, range) in source.files() {
            file.holds(&range, name)?;
            file.unchanged()?;
        }
        if let Some(of) = &source.matrix {
            let failed = |source| LoadError::Weight { name: name.clone(), source };
            let matrix = of.description.check().map_err(failed)?;
            let fits = of.tensors.len() == of.description.tensors.len()
                && [SourceFormat::Canonical(matrix.codes()), SourceFormat::Numbers(Format::F32)]
                    .contains(&source.map.format)
                && matrix.cols() == source.map.cols
                && u64::from(of.first) + u64::from(source.map.rows) <= u64::from(matrix.rows())
                && (source.offset, source.map.stride) == (0, 1);
            assert!(fits, "{name}: the rows of the source must be rows of its matrix: {source:?}");
        }
        if let Some(of) = source.transposed {
            let fits = !matches!(source.map.format, SourceFormat::NegatedExp | SourceFormat::Canonical(_))
                && (source.map.stride, source.matrix.is_none()) == (1, true)
                && u64::from(of.first) + u64::from(source.map.rows) <= u64::from(of.width);
            assert!(fits, "{name}: the rows of the source must be columns of its matrix: {source:?}");
        }
    }
    Ok(())
}

/// The contents of one staging slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Chunk {
    pieces: Vec<Part>,
}

/// A part of a packed tensor, and its position in the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    tensor: usize,
    /// Byte range in the packed tensor.
    range: Range<u64>,
    at: u64,
}

/// What fills one staging slot.
#[derive(Clone, Debug)]
enum Work {
    /// Parts that the host packs.
    Pack(Chunk),
    /// Rows that the device packs.
    Raw(Vec<RawPart>),
}

impl Work {
    /// The tensor and the packed byte with which it begins.
    fn begin(&self, plan: &LoadPlan) -> (usize, u64) {
        let packed = match self {
            Work::Pack(chunk) => chunk.pieces.first().map(|part| (part.tensor, part.range.start)),
            Work::Raw(parts) => {
                parts.first().map(|part| (part.tensor, part.packed(&plan.tensors[part.tensor].packing).start))
            }
        };
        packed.unwrap_or_default()
    }

    /// The packed bytes that the device makes.
    fn packed_on_device(&self, plan: &LoadPlan) -> u64 {
        match self {
            Work::Pack(_) => 0,
            Work::Raw(parts) => parts.iter().map(|part| part.packed_bytes(&plan.tensors[part.tensor].packing)).sum(),
        }
    }
}

/// Divides a plan into what fills a staging slot of `slot_bytes`, in the order of its tensors.
fn divide(plan: &LoadPlan, slot_bytes: u64) -> Vec<Work> {
    let raw_slot = plan.packer.as_ref().map_or(slot_bytes, |packer| slot_bytes.min(packer.slot_bytes()));
    let (mut packed, mut raw) = (Vec::new(), Vec::new());
    for (index, LoadTensor { packing, sources, offset, .. }) in plan.tensors.iter().enumerate() {
        let found = match &plan.packer {
            None => vec![Segment { rows: 0..packing.padded_rows(), way: None }],
            Some(packer) => segments(packing, sources, *offset, raw_slot, |variant| packer.packs(variant)),
        };
        for Segment { rows, way } in found {
            match way {
                Some(way) => raw.push((index, packing.rows_of_unit(), rows, way)),
                None => {
                    let bytes = |row: u32| u64::from(row) * packing.row_bytes();
                    packed.push((index, *packing, bytes(rows.start)..bytes(rows.end)));
                }
            }
        }
    }
    let packed = cut(&packed, slot_bytes).into_iter().map(Work::Pack);
    let raw = cut_raw(&raw, raw_slot, |index, rows, way| way.bytes(&plan.tensors[index].sources, rows));
    let mut chunks: Vec<Work> = packed.chain(raw.into_iter().map(Work::Raw)).collect();
    chunks.sort_by_key(|chunk| chunk.begin(plan));
    chunks
}

/// Cuts parts of tensors into chunks of at most `slot_bytes`. Small parts share a chunk. Large ones are cut at whole row
/// units (rows or row blocks), or at pack units where a row unit is larger than a slot. Each part begins and ends with a
/// row unit.
fn cut(parts: &[(usize, Packing, Range<u64>)], slot_bytes: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let (mut chunk, mut used) = (Chunk::default(), 0u64);
    for (tensor, packing, range) in parts {
        let rows = packing.row_bytes() * u64::from(packing.rows_of_unit());
        let unit = packing.unit_bytes();
        assert!(unit <= slot_bytes, "a slot of {slot_bytes} bytes holds {unit}");
        let grain = if rows <= slot_bytes { rows } else { unit };
        let mut done = range.start;
        while done < range.end {
            let at = used.next_multiple_of(SLOT_ALIGNMENT).min(slot_bytes);
            let room = slot_bytes - at;
            let bytes = if range.end - done <= room { range.end - done } else { room / grain * grain };
            if bytes == 0 {
                chunks.push(std::mem::take(&mut chunk));
                used = 0;
                continue;
            }
            chunk.pieces.push(Part { tensor: *tensor, range: done..done + bytes, at });
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

    fn whole(tensors: &[Packing]) -> Vec<(usize, Packing, Range<u64>)> {
        tensors.iter().enumerate().map(|(index, packing)| (index, *packing, 0..packing.bytes())).collect()
    }

    #[test]
    fn small_tensors_share_a_slot_and_large_ones_are_cut_at_rows() {
        let tensors = [
            packing(1, 100, false, Format::F32),
            packing(1, 100, false, Format::F32),
            packing(10, 512, false, Format::Bf16),
        ];
        let chunks = cut(&whole(&tensors), 4096);
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
        /// Goal: every byte of every tensor is in exactly one part, and parts are whole pack units that do not overlap
        /// in their slot.
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
            for chunk in cut(&whole(&tensors), slot) {
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
        // Source rows 0 to 9 become packed rows 1, 3, 5, …, 19.
        let source = TensorSource {
            file,
            offset: 0,
            map: RowMap { first_row: 1, row_step: 2, ..RowMap::whole(SourceFormat::Numbers(Format::Bf16), 10, 1) },
            transposed: None,
            matrix: None,
        };
        assert_eq!(source.map.source_rows(0..1), 0..0);
        assert_eq!(source.map.source_rows(0..2), 0..1);
        assert_eq!(source.map.source_rows(2..6), 1..3);
        assert_eq!(source.map.source_rows(16..64), 8..10);
    }
}
