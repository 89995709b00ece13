//! The worker process: what `ostinato worker` does. It reads a frame that says what it is for and then answers frames,
//! one after the other, until its input ends; what it must not take more of than it was told is limited by the system.
//! Deliberately absent: what the frames mean (`grammar`, `text::chat`), and who started it (`actors::workers`).

use super::grammar;
use super::text::chat;
use crate::actors::workers::{PANICKED, STACK, read_frame, write_frame};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Address space beside what is used: reserved by allocators and never touched.
const RESERVED: u64 = 512 << 20;
/// Held while a question is asked, so that its answer goes to whoever asked.
static ASKING: Mutex<()> = Mutex::new(());

/// Runs until standard input ends; exit status 2 where it was started by hand.
pub fn serve() -> ExitCode {
    // A job that panics ends the process, so that nothing half done is left; what it would say is nobody's business.
    std::panic::set_hook(Box::new(|_| std::process::exit(PANICKED)));
    // Where the machine has no memory left, a worker is what can be missed.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    // No folder is kept from being unmounted.
    let _ = std::env::set_current_dir("/");
    // A dump of every worker that dies would fill disks.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let thread = std::thread::Builder::new().name("job".to_owned()).stack_size(STACK as usize).spawn(work);
    let worked = thread.map(std::thread::JoinHandle::join);
    match worked {
        Ok(Ok(Ok(()))) => ExitCode::SUCCESS,
        Ok(Ok(Err(error))) => {
            eprintln!("error: {error} (the program starts its workers by itself)");
            ExitCode::from(2)
        }
        _ => ExitCode::FAILURE,
    }
}

/// A service of this process: a request's frame in, its answer out.
type Answer = Box<dyn FnMut(&[u8]) -> Vec<u8>>;

fn work() -> io::Result<()> {
    let cut = |what: &str| io::Error::new(io::ErrorKind::UnexpectedEof, format!("{what} is missing"));
    let read = || read_frame(&mut io::stdin().lock());
    let limits = read()?.ok_or_else(|| cut("the first frame"))?;
    let (memory, limits) = limits.split_first_chunk::<8>().ok_or_else(|| cut("the limit of memory"))?;
    let (millis, _) = limits.split_first_chunk::<8>().ok_or_else(|| cut("the limit of time"))?;
    let (memory, millis) = (u64::from_le_bytes(*memory), u64::from_le_bytes(*millis));
    let first = read()?.ok_or_else(|| cut("the frame that says what it is for"))?;
    let mut answer: Answer = match first.split_first() {
        Some((&grammar::WORKER, vocabulary)) => {
            let mut service = grammar::Service::new(vocabulary, ask).map_err(io::Error::other)?;
            Box::new(move |frame| service.answer(frame))
        }
        Some((&chat::WORKER, templates)) => {
            let mut service = chat::Service::new(templates).map_err(io::Error::other)?;
            Box::new(move |frame| service.answer(frame))
        }
        _ => return Err(cut("what it is for")),
    };
    drop(first);
    limit_memory(memory)?;
    write_frame(&mut io::stdout().lock(), b"ready")?;
    while let Some(frame) = read()? {
        limit_time(Duration::from_millis(millis));
        let answer = answer(&frame);
        write_frame(&mut io::stdout().lock(), &answer)?;
    }
    Ok(())
}

/// Asks whoever has sent the job.
fn ask(question: &[u8]) -> Option<Vec<u8>> {
    let _asking = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
    write_frame(&mut io::stdout().lock(), question).ok()?;
    read_frame(&mut io::stdin().lock()).ok()?
}

/// From now on at most so many bytes more.
fn limit_memory(more: u64) -> io::Result<()> {
    let used = std::fs::read_to_string("/proc/self/statm")?;
    let pages: Vec<u64> = used.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    let page = rustix::param::page_size() as u64;
    let [size, _, _, _, _, data, ..] = pages[..] else { return Err(io::Error::other("/proc/self/statm is strange")) };
    for (resource, most) in [(Resource::Data, data * page + more), (Resource::As, size * page + more + RESERVED)] {
        let Rlimit { current, maximum } = getrlimit(resource);
        // An operator's own limit may be lower.
        let most = [Some(most), current, maximum].into_iter().flatten().min();
        setrlimit(resource, Rlimit { current: most, maximum })?;
    }
    Ok(())
}

/// Whoever has sent a job ends it when its time is over; this is for the case that nobody is there to do so.
fn limit_time(most: Duration) {
    let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs();
    let Rlimit { maximum, .. } = getrlimit(Resource::Cpu);
    let most = used + 2 * most.as_secs() + 3;
    let current = maximum.map_or(most, |maximum| most.min(maximum));
    let _ = setrlimit(Resource::Cpu, Rlimit { current: Some(current), maximum });
}
