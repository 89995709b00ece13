//! Goal: nothing that a client sends can end the server, make it use unbounded memory, or disturb another client.
//! Method: the program itself with the demo model on a CPU driver. During an attack a well-behaved client repeats the
//! same request: its tokens must equal those of an undisturbed run, and the gaps between its messages must stay below a
//! limit. Afterwards the process must be alive, within its memory limits, and serve a new client.
//!
//! Each kind of attack is a module with its own tests and a list `ATTACKS` of the attacks that can be combined.
//! `everything_at_once` runs those against one server, chosen by a seed.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `OSTINATO_HOSTILE_SECONDS` | how long attacks are combined | 10 |
//! | `OSTINATO_HOSTILE_SEED` | the seed that chooses the attacks and their times | 1 |
//! | `OSTINATO_HOSTILE_PROGRAM` | the program that is attacked | the one that was built |
//!
//! A long run: `OSTINATO_HOSTILE_SECONDS=3600 cargo test --test hostile -- everything_at_once --nocapture`.

mod arena;
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod constraints;
mod http;
mod limits;
#[path = "../serving/mod.rs"]
mod serving;

use arena::{Arena, Attack, Bounds, Random, Setup};
use std::time::{Duration, Instant};

/// Returns all attacks that can be combined.
fn attacks() -> Vec<Attack> {
    [checkpoints::ATTACKS, constraints::ATTACKS, http::ATTACKS, limits::ATTACKS].concat()
}

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, must be a number")),
        Err(_) => default,
    }
}

/// Goal: without an attack the harness reports no problem and receives all expected tokens.
#[test]
fn a_quiet_server_is_found_well() {
    let arena = Arena::enter(Setup::default());
    std::thread::sleep(Duration::from_secs(2));
    let seen = arena.leave(Bounds::default());
    assert!(seen.requests >= 1 && seen.tokens >= arena::TOKENS as usize, "{seen:?}");
}

/// Goal: neither requests that do not end nor files that are wrong harm others. Method: eight HTTP connections of each kind
/// of unfinished requests, each of which must be closed in the time of its kind, which takes half a minute; beside them
/// short attacks on the same port, and then bad checkpoints, truncated weights and changed configurations. All of it on one
/// server, whose health probe is answered all the time.
#[test]
fn requests_that_do_not_end_and_models_that_cannot_be_loaded() {
    let arena = Arena::enter(Setup { further: Some(checkpoints::further), ..Setup::default() });
    let target = arena.target();
    let probe = http::Probe::start(&target);
    std::thread::scope(|scope| {
        scope.spawn(|| http::all_are_closed(&target));
        let stage = |name: &str, attack: fn(&Arena)| {
            let begun = Instant::now();
            attack(&arena);
            eprintln!("{name} took {:.1} s", begun.elapsed().as_secs_f64());
        };
        stage("short attacks", http::short_attacks);
        stage("bad checkpoints", checkpoints::bad_checkpoints_are_refused_by_name);
        stage("truncated weights", checkpoints::weights_that_are_truncated_end_their_load_only);
        stage("changed configurations", checkpoints::configurations_that_change_beside_loads_leave_nothing_undone);
    });
    target.answers_new_clients();
    probe.end();
    let seen = arena.leave(Bounds { peak_mib: 512, ..Bounds::default() });
    eprintln!("{seen:?}");
}

/// Goal: three concurrent attacks, chosen again and again until the time is over, do not harm the server.
#[test]
fn everything_at_once() {
    let (seconds, seed) = (number("OSTINATO_HOSTILE_SECONDS", 10), number("OSTINATO_HOSTILE_SEED", 1));
    let attacks = attacks();
    eprintln!("OSTINATO_HOSTILE_SEED={seed}, {seconds} s");
    let arena = Arena::enter(Setup { further: Some(checkpoints::further), ..Setup::default() });
    let until = Instant::now() + Duration::from_secs(seconds);
    let target = arena.target();
    std::thread::scope(|scope| {
        for lane in 0..3 {
            let (target, attacks) = (&target, &attacks);
            scope.spawn(move || {
                let mut random = Random::new(seed.wrapping_mul(3).wrapping_add(lane));
                while Instant::now() < until {
                    let (name, attack) = attacks[random.below(attacks.len() as u64) as usize];
                    let begun = Instant::now();
                    attack(target, &mut random);
                    eprintln!("lane {lane}: {name} took {:.1} s", begun.elapsed().as_secs_f64());
                }
            });
        }
    });
    // Each attack alone has a smaller memory limit. Before memory was bounded, the attacks together used more than 5
    // GiB.
    let seen = arena.leave(Bounds { peak_mib: 2048, ..Bounds::default() });
    eprintln!("{seen:?}");
}
