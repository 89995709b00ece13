//! The memory plan: the sum of everything that a replica will hold on its device, compared with the available memory
//! before anything is allocated. Pure arithmetic on plain data.
//! Not here: allocation, and how many bytes a model needs.

use std::fmt;

/// The purpose of memory. The variants are in the order of the printed table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// Packed weights.
    Weights,
    /// The packed weights of the draft model.
    DraftWeights,
    /// The pages of the KV cache.
    KvPages,
    /// Per-sequence state: slots, page tables, sampling parameters.
    State,
    /// The recurrent state of sequences, and its snapshots.
    Recurrent,
    /// Activations and partial sums, reused by every step.
    Scratch,
    /// The messages between the devices of a split model.
    Exchange,
    /// The staging ring through which weights are copied to the device.
    Staging,
    /// The ring buffer through which tokens return to the host.
    Ring,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Purpose::Weights => "weights",
            Purpose::DraftWeights => "draft weights",
            Purpose::KvPages => "kv pages",
            Purpose::State => "state",
            Purpose::Recurrent => "recurrent state",
            Purpose::Scratch => "scratch",
            Purpose::Exchange => "exchange",
            Purpose::Staging => "staging",
            Purpose::Ring => "ring",
        })
    }
}

/// The memory in which an entry is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Device memory. Counts against the device's budget and the operator's limit.
    Device,
    /// Host memory that the device can access. Counts against the budget only if host and device share one memory.
    Host,
}

/// The available memory, from the device and the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// The device's name, for messages.
    pub device: String,
    /// The bytes of the device-local heap that this process may still allocate: `VK_EXT_memory_budget`'s budget minus
    /// usage, or the heap's size if the driver reports no budget.
    pub free_bytes: u64,
    /// The size of that heap in bytes.
    pub total_bytes: u64,
    /// The operator's limit for this replica (`--memory-limit`), in bytes.
    pub limit_bytes: Option<u64>,
    /// `maxMemoryAllocationSize`: the maximum size of a single buffer, in bytes.
    pub max_allocation_bytes: u64,
    /// Whether host and device share one memory, as with integrated GPUs and CPU drivers.
    pub unified: bool,
    /// The bytes kept free for the driver's own allocations (pipelines, command buffers) and for alignment between
    /// buffers. See [`default_reserve`].
    pub reserve_bytes: u64,
}

/// Returns the default reserve: 2 % of the heap, at least 64 MiB and at most 1 GiB. It has proved sufficient.
pub fn default_reserve(total_bytes: u64) -> u64 {
    (total_bytes / 50).clamp(64 * MIB, GIB)
}

impl MemoryLimits {
    /// The bytes of device memory that a plan may use: free memory minus the reserve, and at most the operator's limit.
    pub fn available_bytes(&self) -> u64 {
        let free = self.free_bytes.saturating_sub(self.reserve_bytes);
        self.limit_bytes.map_or(free, |limit| limit.min(free))
    }
}

/// A set of buffers that will be allocated for one purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanEntry {
    /// The purpose of the buffers.
    pub purpose: Purpose,
    /// The total size of the buffers in bytes.
    pub bytes: u64,
    /// The name and size of the largest buffer, which is compared with the driver's limit.
    pub largest: Option<(String, u64)>,
    /// The memory in which the buffers are allocated.
    pub side: Side,
    /// For the table: the number of equal things that the entry holds, and a text that names them.
    pub things: Option<(u64, String)>,
}

impl PlanEntry {
    /// Creates an entry from the buffers (name, bytes) of one purpose.
    pub fn of_buffers<'a>(
        purpose: Purpose,
        side: Side,
        buffers: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> PlanEntry {
        let mut bytes = 0;
        let mut largest: Option<(&str, u64)> = None;
        for (name, size) in buffers {
            bytes += size;
            if largest.is_none_or(|(_, most)| size > most) {
                largest = Some((name, size));
            }
        }
        PlanEntry { purpose, bytes, largest: largest.map(|(name, size)| (name.to_owned(), size)), side, things: None }
    }
}

/// The requested number of KV pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// This number, raised to [`KvRequest::least`] if it is smaller. The plan is refused if they do not fit.
    Exactly(u64),
    /// The number that fits, but at most this number or [`KvRequest::least`], whichever is larger.
    UpTo(u64),
    /// The number that fits.
    All,
}

/// The KV pool whose size the plan determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRequest {
    /// The size of one page over all layers, in bytes; 0 for layers without keys and values, which take any number of
    /// pages.
    pub page_bytes: u64,
    /// The size of one page's share of the pool's largest single buffer (for example one layer's keys), in bytes. That
    /// buffer must not exceed the driver's largest allocation.
    pub page_bytes_in_largest_buffer: u64,
    /// The requested number of pages.
    pub pages: Pages,
    /// The minimum number of pages; a model needs at least enough for one sequence.
    pub least: u64,
    /// The pages of layers with a sliding window, if these have pages of their own. Those above are then of the other layers.
    pub window: Option<WindowRequest>,
}

/// The pool of window pages. It is sized with the KV pool: for as many sequences as fit with `typical` pages of the KV pool
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowRequest {
    /// The size of one page over all layers with a window, in bytes.
    pub page_bytes: u64,
    /// The size of one page's share of the pool's largest single buffer, in bytes.
    pub page_bytes_in_largest_buffer: u64,
    /// The number of pages that one more sequence needs.
    pub each: u64,
    /// The number of pages that one sequence needs.
    pub least: u64,
    /// The number of pages beyond which more are of no use.
    pub most: u64,
    /// The number of pages of the KV pool that a sequence is expected to have.
    pub typical: u64,
}

impl WindowRequest {
    /// Returns the number of pages if `free` bytes are left for this pool and the KV pool, whose pages have `page_bytes` and
    /// of which `kv_pages` are asked for, if any are; `None` if one sequence does not fit.
    fn pages(&self, free: u64, page_bytes: u64, kv_pages: Option<u64>, max_allocation: u64) -> Option<u64> {
        let own = |sequences: u64| (self.least + sequences * self.each) * self.page_bytes;
        let other = |sequences: u64| kv_pages.unwrap_or((1 + sequences) * self.typical) * page_bytes;
        let fits = |sequences: u64| own(sequences) + other(sequences) <= free;
        let allocation = max_allocation.checked_div(self.page_bytes_in_largest_buffer).unwrap_or(u64::MAX);
        let most = self.most.min(allocation);
        if own(0) > free || self.least > allocation {
            return None;
        }
        // The number of sequences after the first.
        let all = most.saturating_sub(self.least).div_ceil(self.each.max(1));
        let sequences = (0..=all).rev().find(|sequences| fits(*sequences)).unwrap_or(0);
        Some((self.least + sequences * self.each).min(most.max(self.least)))
    }
}

/// The reason for which a plan was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The purposes up to and including this one do not fit.
    #[error("cannot reserve {} for {purpose}, {} {} on {device:?}",
        told_apart(*.asked, *.free).0, told_apart(*.asked, *.free).1,
        if *.limited { "left under the memory limit" } else { "free" })]
    DoesNotFit {
        /// The first purpose that does not fit.
        purpose: Purpose,
        /// The bytes that it needs.
        asked: u64,
        /// The bytes that the purposes before it have left.
        free: u64,
        /// Whether the operator's limit was the tighter bound, rather than the device's memory.
        limited: bool,
        /// The name of the device.
        device: String,
    },
    /// One buffer is larger than the driver allows.
    #[error("{name:?} needs {} in one allocation, {device:?} allows {}",
        told_apart(*.asked, *.allowed).0, told_apart(*.asked, *.allowed).1)]
    TooLarge {
        /// The name of the buffer, or of the purpose if the buffer has no name.
        name: String,
        /// The size of the buffer, in bytes.
        asked: u64,
        /// `maxMemoryAllocationSize`.
        allowed: u64,
        /// The name of the device.
        device: String,
    },
}

/// A memory plan that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    limits: MemoryLimits,
    entries: Vec<PlanEntry>,
    kv_pages: u64,
    page_bytes: u64,
    pages_bound: PagesBound,
    /// The number of window pages, and their size in bytes.
    window: Option<(u64, u64)>,
}

/// The setting or limit that determined the number of KV pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PagesBound {
    None,
    Asked,
    Memory,
    Allocation,
}

impl Plan {
    /// Sums `entries` (without the KV pool) in the order of their purposes, then sizes the KV pool from what remains.
    /// Returns an error for the first purpose that does not fit, or for a buffer that is too large.
    pub fn new(limits: MemoryLimits, mut entries: Vec<PlanEntry>, kv: Option<KvRequest>) -> Result<Plan, PlanError> {
        entries.retain(|entry| entry.bytes > 0);
        entries.sort_by_key(|entry| entry.purpose);
        for entry in &entries {
            let (name, asked) = entry.largest.clone().unwrap_or((entry.purpose.to_string(), 0));
            if asked > limits.max_allocation_bytes {
                return Err(PlanError::TooLarge {
                    name,
                    asked,
                    allowed: limits.max_allocation_bytes,
                    device: limits.device,
                });
            }
        }
        let available = limits.available_bytes();
        let limited = limits.limit_bytes == Some(available);
        let refuse = |purpose, asked, free| PlanError::DoesNotFit {
            purpose,
            asked,
            free,
            limited,
            device: limits.device.clone(),
        };
        let mut free = available;
        for entry in &entries {
            if entry.side == Side::Host && !limits.unified {
                continue;
            }
            free = free.checked_sub(entry.bytes).ok_or_else(|| refuse(entry.purpose, entry.bytes, free))?;
        }
        let (mut kv_pages, mut page_bytes, mut pages_bound) = (0, 0, PagesBound::None);
        let mut window = None;
        if let Some((kv, request)) = kv.and_then(|kv| Some((kv, kv.window?))) {
            let asked = match kv.pages {
                Pages::Exactly(pages) => Some(pages.max(kv.least)),
                Pages::UpTo(_) | Pages::All => None,
            };
            let pages = request.pages(free, kv.page_bytes, asked, limits.max_allocation_bytes);
            let pages = pages.ok_or_else(|| refuse(Purpose::KvPages, request.least * request.page_bytes, free))?;
            free -= pages * request.page_bytes;
            window = Some((pages, request.page_bytes));
        }
        if let Some(kv) = kv {
            assert!(kv.page_bytes_in_largest_buffer <= kv.page_bytes, "a page has bytes");
            let by_memory = free.checked_div(kv.page_bytes).unwrap_or(u64::MAX);
            let by_allocation =
                limits.max_allocation_bytes.checked_div(kv.page_bytes_in_largest_buffer).unwrap_or(u64::MAX);
            let fit = by_memory.min(by_allocation);
            let asked = match kv.pages {
                Pages::Exactly(pages) => pages.max(kv.least),
                Pages::UpTo(_) | Pages::All => kv.least,
            };
            if asked > by_memory {
                return Err(refuse(Purpose::KvPages, asked.saturating_mul(kv.page_bytes), free));
            }
            if asked > by_allocation {
                return Err(PlanError::TooLarge {
                    name: Purpose::KvPages.to_string(),
                    asked: asked.saturating_mul(kv.page_bytes_in_largest_buffer),
                    allowed: limits.max_allocation_bytes,
                    device: limits.device,
                });
            }
            kv_pages = match kv.pages {
                Pages::Exactly(_) => asked,
                Pages::UpTo(most) => fit.min(most.max(kv.least)),
                Pages::All => fit,
            };
            page_bytes = kv.page_bytes;
            pages_bound = if kv_pages < fit || matches!(kv.pages, Pages::Exactly(_)) {
                PagesBound::Asked
            } else if by_allocation < by_memory {
                PagesBound::Allocation
            } else {
                PagesBound::Memory
            };
            let pool = PlanEntry {
                purpose: Purpose::KvPages,
                bytes: kv_pages * kv.page_bytes + window.map_or(0, |(pages, bytes)| pages * bytes),
                largest: Some(("kv pages".to_owned(), kv_pages * kv.page_bytes_in_largest_buffer)),
                side: Side::Device,
                things: None,
            };
            entries.extend((pool.bytes > 0).then_some(pool));
            entries.sort_by_key(|entry| entry.purpose);
        }
        Ok(Plan { limits, entries, kv_pages, page_bytes, pages_bound, window })
    }

    /// The number of pages of the KV pool.
    pub fn kv_pages(&self) -> u64 {
        self.kv_pages
    }

    /// The number of pages of the layers with a sliding window, if these have pages of their own.
    pub fn window_pages(&self) -> Option<u64> {
        self.window.map(|(pages, _)| pages)
    }

    /// The size of one KV page over all layers, in bytes; 0 without a KV pool.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// The limits that the plan was compared with.
    pub fn limits(&self) -> &MemoryLimits {
        &self.limits
    }

    /// The entries in the order of the table, including the KV pool.
    pub fn entries(&self) -> &[PlanEntry] {
        &self.entries
    }

    /// Returns the bytes planned for one purpose.
    pub fn bytes(&self, purpose: Purpose) -> u64 {
        self.entries.iter().filter(|e| e.purpose == purpose).map(|e| e.bytes).sum()
    }

    /// The bytes of device memory that the plan uses.
    pub fn device_bytes(&self) -> u64 {
        self.entries.iter().filter(|e| e.side == Side::Device || self.limits.unified).map(|e| e.bytes).sum()
    }
}

/// A line of the table that is printed at start.
struct Line {
    name: String,
    size: String,
    note: String,
}

impl Plan {
    fn lines(&self) -> Vec<Line> {
        let size = |bytes: u64| HumanBytes(bytes).to_string();
        let mut lines = Vec::new();
        let mut line = |name: &str, size: String, note: String| lines.push(Line { name: name.to_owned(), size, note });
        for entry in &self.entries {
            let mut note = match entry.side {
                Side::Host if !self.limits.unified => "host memory".to_owned(),
                _ => String::new(),
            };
            if let Some((count, what)) = &entry.things {
                note = format!("{what} of {}", size(entry.bytes / (*count).max(1)));
            }
            if entry.purpose == Purpose::KvPages {
                note = format!(
                    "{} pages of {}{}",
                    self.kv_pages,
                    size(self.page_bytes),
                    match self.pages_bound {
                        PagesBound::Memory => ", all that fit",
                        PagesBound::Allocation => ", bound by the largest allocation",
                        PagesBound::Asked | PagesBound::None => "",
                    }
                );
                if let Some((pages, bytes)) = self.window {
                    note = format!("{note}; {pages} window pages of {}", size(bytes));
                }
            }
            line(&entry.purpose.to_string(), size(entry.bytes), note);
        }
        line("total", size(self.device_bytes()), "of the device's memory".to_owned());
        let of = format!("of {}, {} kept back", size(self.limits.total_bytes), size(self.limits.reserve_bytes));
        line("free", size(self.limits.free_bytes), of);
        if let Some(limit) = self.limits.limit_bytes {
            line("limit", size(limit), "set by the operator".to_owned());
        }
        lines
    }
}

impl fmt::Display for Plan {
    /// Writes the table that is printed at start.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lines();
        let first = lines.iter().map(|line| line.name.len()).max().unwrap_or(0);
        let second = lines.iter().map(|line| line.size.len()).max().unwrap_or(0);
        write!(f, "memory plan for {:?}", self.limits.device)?;
        for Line { name, size, note } in lines {
            let line = format!("  {name:<first$}  {size:>second$}  {note}");
            write!(f, "\n{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The plan of one of several devices of a replica.
#[derive(Clone, Debug)]
pub struct PlanColumn {
    /// What the device has of the model.
    pub heading: String,
    /// The plan.
    pub plan: Plan,
}

/// The plans of a replica that is split over several devices.
#[derive(Clone, Debug)]
pub struct PlanTable(pub Vec<PlanColumn>);

impl fmt::Display for PlanTable {
    /// Writes a table with a column for each device. Behind each row are the notes of all devices, equal ones once.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns: Vec<Vec<Line>> = self.0.iter().map(|column| column.plan.lines()).collect();
        let mut names: Vec<&str> = Vec::new();
        // In the order of each plan, which has its entries by purpose.
        for lines in &columns {
            let mut at = 0;
            for line in lines {
                at = match names.iter().position(|name| *name == line.name) {
                    Some(found) => found + 1,
                    None => {
                        names.insert(at, &line.name);
                        at + 1
                    }
                };
            }
        }
        let first = names.iter().map(|name| name.len()).max().unwrap_or(0);
        let width = |(column, lines): (&PlanColumn, &Vec<Line>)| {
            let heads = [column.plan.limits.device.len() + 2, column.heading.len()];
            lines.iter().map(|line| line.size.len()).chain(heads).max().unwrap_or(0)
        };
        let widths: Vec<usize> = self.0.iter().zip(&columns).map(width).collect();
        let mut row = |name: &str, cells: &[String], notes: &[&str]| {
            let cells: Vec<String> = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
            let line = format!("  {name:<first$}  {}  {}", cells.join("  "), notes.join(" | "));
            write!(f, "\n{}", line.trim_end())
        };
        let devices: Vec<String> = self.0.iter().map(|column| format!("{:?}", column.plan.limits.device)).collect();
        let headings: Vec<String> = self.0.iter().map(|column| column.heading.clone()).collect();
        row("", &devices, &[])?;
        row("", &headings, &[])?;
        for name in names {
            let of = |lines: &'_ Vec<Line>| lines.iter().position(|line| line.name == name);
            let found: Vec<Option<&Line>> = columns.iter().map(|lines| of(lines).map(|at| &lines[at])).collect();
            let cells: Vec<String> =
                found.iter().map(|line| line.map_or("-".to_owned(), |line| line.size.clone())).collect();
            let mut notes: Vec<&str> = Vec::new();
            for note in found.iter().flatten().map(|line| line.note.as_str()) {
                if !note.is_empty() && !notes.contains(&note) {
                    notes.push(note);
                }
            }
            row(name, &cells, &notes)?;
        }
        Ok(())
    }
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Displays a number of bytes in a readable unit, such as `3.1 GiB`, `512.0 MiB` or `36.0 KiB`, with one decimal unless
/// the format specifies a precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanBytes(pub u64);

/// Formats two different sizes with just enough decimals that the texts differ.
pub(super) fn told_apart(a: u64, b: u64) -> (String, String) {
    (1..6)
        .map(|digits| (format!("{:.digits$}", HumanBytes(a)), format!("{:.digits$}", HumanBytes(b))))
        .find(|(a, b)| a != b)
        .unwrap_or_else(|| (format!("{a} B"), format!("{b} B")))
}

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(1);
        let units = [(GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")];
        let text = units.iter().find_map(|(unit, name)| {
            // Compared as printed, so that a size that would round to 1024.0 MiB is shown as 1.0 GiB.
            let text = format!("{:.digits$}", self.0 as f64 / *unit as f64);
            (text.parse::<f64>().is_ok_and(|shown| shown >= 1.0)).then(|| format!("{text} {name}"))
        });
        f.write_str(&text.unwrap_or_else(|| format!("{} B", self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> MemoryLimits {
        MemoryLimits {
            device: "RTX 4090".into(),
            free_bytes: 10 * GIB,
            total_bytes: 24 * GIB,
            limit_bytes: None,
            max_allocation_bytes: 4 * GIB,
            unified: false,
            reserve_bytes: 0,
        }
    }

    fn entry(purpose: Purpose, bytes: u64, side: Side) -> PlanEntry {
        PlanEntry { purpose, bytes, largest: None, side, things: None }
    }

    #[test]
    fn refuses_with_both_numbers_and_the_device() {
        let limits = MemoryLimits { free_bytes: (2.4 * GIB as f64) as u64, ..limits() };
        let weights = entry(Purpose::Weights, (3.1 * GIB as f64) as u64, Side::Device);
        let error = Plan::new(limits, vec![weights], None).unwrap_err();
        assert_eq!(error.to_string(), "cannot reserve 3.1 GiB for weights, 2.4 GiB free on \"RTX 4090\"");
    }

    #[test]
    fn names_the_purpose_that_no_longer_fits_and_what_the_earlier_ones_left() {
        let entries =
            vec![entry(Purpose::Scratch, 3 * GIB, Side::Device), entry(Purpose::Weights, 8 * GIB, Side::Device)];
        let error = Plan::new(limits(), entries, None).unwrap_err();
        assert_eq!(
            error,
            PlanError::DoesNotFit {
                purpose: Purpose::Scratch,
                asked: 3 * GIB,
                free: 2 * GIB,
                limited: false,
                device: "RTX 4090".into()
            }
        );
    }

    #[test]
    fn the_operators_limit_is_named_when_it_is_the_bound() {
        let limits = MemoryLimits { limit_bytes: Some(GIB), ..limits() };
        let error = Plan::new(limits, vec![entry(Purpose::Weights, 2 * GIB, Side::Device)], None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot reserve 2.0 GiB for weights, 1.0 GiB left under the memory limit on \"RTX 4090\""
        );
    }

    #[test]
    fn a_limit_above_free_memory_changes_nothing() {
        let limits = MemoryLimits { limit_bytes: Some(100 * GIB), ..limits() };
        let error = Plan::new(limits, vec![entry(Purpose::Weights, 11 * GIB, Side::Device)], None).unwrap_err();
        assert!(error.to_string().contains("10.0 GiB free"), "{error}");
    }

    #[test]
    fn host_entries_count_only_where_memory_is_shared() {
        let entries =
            vec![entry(Purpose::Weights, 9 * GIB, Side::Device), entry(Purpose::Staging, 2 * GIB, Side::Host)];
        let plan = Plan::new(limits(), entries.clone(), None).unwrap();
        assert_eq!(plan.device_bytes(), 9 * GIB);
        let shared = MemoryLimits { unified: true, ..limits() };
        assert!(matches!(
            Plan::new(shared, entries, None),
            Err(PlanError::DoesNotFit { purpose: Purpose::Staging, .. })
        ));
    }

    #[test]
    fn one_buffer_above_the_drivers_limit_is_refused_by_name() {
        let head = PlanEntry::of_buffers(
            Purpose::Weights,
            Side::Device,
            [("embed", GIB), ("lm_head.weight", 5 * GIB), ("norm", 4096)],
        );
        assert_eq!(head.bytes, 6 * GIB + 4096);
        let error = Plan::new(limits(), vec![head], None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"lm_head.weight\" needs 5.0 GiB in one allocation, \"RTX 4090\" allows 4.0 GiB"
        );
    }

    fn kv(pages: Pages) -> KvRequest {
        KvRequest { page_bytes: 3 * MIB, page_bytes_in_largest_buffer: MIB, pages, least: 4, window: None }
    }

    #[test]
    fn pages_fill_what_remains() {
        let weights = entry(Purpose::Weights, 4 * GIB, Side::Device);
        let plan = Plan::new(limits(), vec![weights.clone()], Some(kv(Pages::All))).unwrap();
        assert_eq!(plan.kv_pages(), 6 * 1024 / 3);
        assert!(plan.device_bytes() <= 10 * GIB);
        assert_eq!(plan.bytes(Purpose::KvPages), plan.kv_pages() * 3 * MIB);

        let reserved = MemoryLimits { reserve_bytes: 3 * GIB, ..limits() };
        let plan = Plan::new(reserved, vec![weights.clone()], Some(kv(Pages::All))).unwrap();
        assert_eq!(plan.kv_pages(), 1024);

        let plan = Plan::new(limits(), vec![weights.clone()], Some(kv(Pages::UpTo(100)))).unwrap();
        assert_eq!(plan.kv_pages(), 100);
        let plan = Plan::new(limits(), vec![weights.clone()], Some(kv(Pages::UpTo(9999)))).unwrap();
        assert_eq!(plan.kv_pages(), 2048);
        let plan = Plan::new(limits(), vec![weights.clone()], Some(kv(Pages::Exactly(2048)))).unwrap();
        assert_eq!(plan.kv_pages(), 2048);
        let error = Plan::new(limits(), vec![weights], Some(kv(Pages::Exactly(2049)))).unwrap_err();
        assert_eq!(error.to_string(), "cannot reserve 6.003 GiB for kv pages, 6.000 GiB free on \"RTX 4090\"");
    }

    #[test]
    fn pages_are_bound_by_the_largest_allocation() {
        let limits = MemoryLimits { max_allocation_bytes: 100 * MIB, ..limits() };
        let plan = Plan::new(limits.clone(), vec![], Some(kv(Pages::All))).unwrap();
        assert_eq!(plan.kv_pages(), 100);
        assert!(plan.to_string().contains("bound by the largest allocation"), "{plan}");
        let error = Plan::new(limits, vec![], Some(kv(Pages::Exactly(101)))).unwrap_err();
        assert!(matches!(error, PlanError::TooLarge { .. }), "{error}");
    }

    #[test]
    fn window_pages_are_planned_for_the_sequences_that_fit_with_them() {
        let window = WindowRequest {
            page_bytes: 12 * MIB,
            page_bytes_in_largest_buffer: MIB,
            each: 10,
            least: 14,
            most: 1000,
            typical: 100,
        };
        let with = |pages| KvRequest { window: Some(window), ..kv(pages) };
        // 10 GiB hold 168 MiB, and 300 MiB for the first sequence, and 420 MiB for each of 23 more.
        let plan = Plan::new(limits(), vec![], Some(with(Pages::All))).unwrap();
        assert_eq!(plan.window_pages(), Some(14 + 23 * 10));
        assert_eq!(plan.kv_pages(), (10 * 1024 - 244 * 12) / 3);
        assert!(plan.device_bytes() <= 10 * GIB && plan.device_bytes() > 10 * GIB - 3 * MIB);
        assert!(plan.to_string().contains("; 244 window pages of 12.0 MiB"), "{plan}");
        // What is asked for comes first.
        let plan = Plan::new(limits(), vec![], Some(with(Pages::Exactly(3000)))).unwrap();
        assert_eq!((plan.kv_pages(), plan.window_pages()), (3000, Some(14 + 8 * 10)));
        // No more than are of use.
        let few = KvRequest { window: Some(WindowRequest { most: 54, ..window }), ..kv(Pages::UpTo(10)) };
        let plan = Plan::new(limits(), vec![], Some(few)).unwrap();
        assert_eq!((plan.kv_pages(), plan.window_pages()), (10, Some(54)));
        let weights = entry(Purpose::Weights, 10 * GIB - 100 * MIB, Side::Device);
        let error = Plan::new(limits(), vec![weights], Some(with(Pages::All))).unwrap_err();
        assert_eq!(error.to_string(), "cannot reserve 168.0 MiB for kv pages, 100.0 MiB free on \"RTX 4090\"");
    }

    #[test]
    fn too_few_pages_are_refused() {
        let weights = entry(Purpose::Weights, 10 * GIB - 11 * MIB, Side::Device);
        let error = Plan::new(limits(), vec![weights], Some(kv(Pages::All))).unwrap_err();
        assert_eq!(error.to_string(), "cannot reserve 12.0 MiB for kv pages, 11.0 MiB free on \"RTX 4090\"");
    }

    #[test]
    fn prints_an_aligned_table() {
        let limits = MemoryLimits { limit_bytes: Some(8 * GIB), reserve_bytes: 512 * MIB, ..limits() };
        let entries = vec![
            entry(Purpose::Staging, 256 * MIB, Side::Host),
            entry(Purpose::Scratch, 36 * 1024, Side::Device),
            entry(Purpose::Weights, 2 * GIB, Side::Device),
        ];
        let plan = Plan::new(limits, entries, Some(kv(Pages::UpTo(100)))).unwrap();
        assert_eq!(
            plan.to_string(),
            "memory plan for \"RTX 4090\"\n  \
             weights     2.0 GiB\n  \
             kv pages  300.0 MiB  100 pages of 3.0 MiB\n  \
             scratch    36.0 KiB\n  \
             staging   256.0 MiB  host memory\n  \
             total       2.3 GiB  of the device's memory\n  \
             free       10.0 GiB  of 24.0 GiB, 512.0 MiB kept back\n  \
             limit       8.0 GiB  set by the operator"
        );
    }

    #[test]
    fn prints_a_column_for_each_device() {
        let of = |device: &str, heading: &str, weights: u64, host: &[PlanEntry], page_bytes: u64| {
            let limits = MemoryLimits { device: device.into(), ..limits() };
            let entries = [&[entry(Purpose::Weights, weights, Side::Device)], host].concat();
            let kv = KvRequest { page_bytes, ..kv(Pages::UpTo(100)) };
            PlanColumn { heading: heading.into(), plan: Plan::new(limits, entries, Some(kv)).unwrap() }
        };
        let ring = entry(Purpose::Ring, 4 * MIB, Side::Host);
        let table = PlanTable(vec![
            of("RTX 4090", "layers 0 to 23", 3 * GIB, &[], 4 * MIB),
            of("RX 7600", "layers 24 to 35", 2 * GIB, &[ring], 2 * MIB),
        ]);
        assert_eq!(
            format!("on 2 devices{table}"),
            "on 2 devices\n                \
             \"RTX 4090\"        \"RX 7600\"\n            \
             layers 0 to 23  layers 24 to 35\n  \
             weights          3.0 GiB          2.0 GiB\n  \
             kv pages       400.0 MiB        200.0 MiB  100 pages of 4.0 MiB | 100 pages of 2.0 MiB\n  \
             ring                   -          4.0 MiB  host memory\n  \
             total            3.4 GiB          2.2 GiB  of the device's memory\n  \
             free            10.0 GiB         10.0 GiB  of 24.0 GiB, 0 B kept back"
        );
    }

    #[test]
    fn units_do_not_round_past_themselves() {
        assert_eq!(HumanBytes(0).to_string(), "0 B");
        assert_eq!(HumanBytes(900).to_string(), "900 B");
        assert_eq!(HumanBytes(1023).to_string(), "1.0 KiB");
        assert_eq!(HumanBytes(MIB - 1).to_string(), "1.0 MiB");
        assert_eq!(HumanBytes(GIB - 1).to_string(), "1.0 GiB");
        assert_eq!(HumanBytes(1536 * MIB).to_string(), "1.5 GiB");
    }
}
