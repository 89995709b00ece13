//! The worker process (`ostinato worker`). It reads a frame with its limits and a frame that selects its service, then
//! answers frames one after the other until its input ends. The system enforces its limits, and runs it at a lower
//! priority than the program that started it.
//! Not here: what the frames mean (`grammar`, `text::chat`), and the side that starts workers (`actors::workers`).

use super::grammar;
use super::text::chat;
use crate::actors::workers::{NICE, PANICKED, STACK, read_frame, write_frame};
use rustix::process::{Resource, Rlimit, getrlimit, nice, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The bytes of address space that are allowed beyond memory in use, because allocators reserve more than they use.
const RESERVED: u64 = 512 << 20;
/// Held while a question is asked, so that concurrent questions get their own answers.
static ASKING: Mutex<()> = Mutex::new(());

/// Runs the worker until standard input ends. The exit status is 2 if it was started by a user.
pub fn serve() -> ExitCode {
    // A job that panics ends the process, so that no half-done state is left. Its message may quote a request.
    std::panic::set_hook(Box::new(|_| std::process::exit(PANICKED)));
    // Work of constraints and templates gives way to the engine's threads. Fails nowhere: the value only rises.
    let _ = nice(NICE);
    // If the machine runs out of memory, the system should end a worker first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    // The working directory must not keep a file system from being unmounted.
    let _ = std::env::set_current_dir("/");
    // Core dumps of workers that die would fill the disk.
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

/// The service of this process: maps the frame of a request to the frame of its answer.
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

/// Sends a question to the process that has sent the job, and waits for the answer; `None` if that has gone.
fn ask(question: &[u8]) -> Option<Vec<u8>> {
    let _asking = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
    write_frame(&mut io::stdout().lock(), question).ok()?;
    read_frame(&mut io::stdin().lock()).ok()?
}

/// Limits memory and address space to `more` bytes beyond what the process has now.
fn limit_memory(more: u64) -> io::Result<()> {
    let used = std::fs::read_to_string("/proc/self/statm")?;
    let pages: Vec<u64> = used.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    let page = rustix::param::page_size() as u64;
    let [size, _, _, _, _, data, ..] = pages[..] else { return Err(io::Error::other("/proc/self/statm is strange")) };
    for (resource, most) in [(Resource::Data, data * page + more), (Resource::As, size * page + more + RESERVED)] {
        let Rlimit { current, maximum } = getrlimit(resource);
        // A limit that the operator has set may be lower.
        let most = [Some(most), current, maximum].into_iter().flatten().min();
        setrlimit(resource, Rlimit { current: most, maximum })?;
    }
    Ok(())
}

/// Limits the processor time of a job, for the case that the process that has sent it is gone. Otherwise that process
/// ends the job earlier, at `most`.
fn limit_time(most: Duration) {
    let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs();
    let Rlimit { maximum, .. } = getrlimit(Resource::Cpu);
    let most = used + 2 * most.as_secs() + 3;
    let current = maximum.map_or(most, |maximum| most.min(maximum));
    let _ = setrlimit(Resource::Cpu, Rlimit { current: Some(current), maximum });
}
