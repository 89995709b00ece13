//! The faults that tests inject into steps without barriers: at which places calls poll for other calls' words, and
//! at which tokens each of these places has been broken so far.
//! Not here: how a place is broken (`kernels::tags`), and which steps contain a broken one (`gpu::executor`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A place in a decode step at which a call polls for words that another call writes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wait {
    /// The number of rows of the step.
    pub rows: u32,
    /// The number of drafts that the step verifies for each sequence.
    pub drafts: u32,
    /// The call's number in its step, counted from 1.
    pub number: u32,
    /// The call's label, for example `layers.1.mlp.down`.
    pub call: String,
    /// The name of the argument that holds the tag it polls for, for example `x_tag`.
    pub tag: &'static str,
}

/// By token, the number of times that a wait was broken in the step that draws it. Tokens are counted from 0 in each
/// output.
pub type BrokenAt = BTreeMap<u32, u32>;

/// The waits that tests break, and what they have broken. Empty unless the tuning asks for injected faults.
#[derive(Debug, Default)]
pub struct Injections {
    waits: Vec<Wait>,
    every: AtomicU32,
    broken: Mutex<Vec<BrokenAt>>,
    others: AtomicU32,
    prompts_behind: AtomicU32,
    drafts_behind: AtomicU32,
}

impl Injections {
    /// Creates the injections of these waits into every `every`-th step without barriers; 0: into none yet.
    pub fn new(waits: Vec<Wait>, every: u32) -> Injections {
        let broken = Mutex::new(vec![BrokenAt::new(); waits.len()]);
        Injections { waits, every: every.into(), broken, ..Injections::default() }
    }

    /// Every how many steps without barriers one contains a broken wait; 0: never.
    pub fn every(&self) -> u32 {
        self.every.load(Relaxed)
    }

    /// Changes how often steps contain a broken wait, from the next plan on.
    pub fn set_every(&self, every: u32) {
        self.every.store(every, Relaxed);
    }

    /// Returns the index of the wait that the next broken step of `rows` rows, with `drafts` drafts for each sequence, breaks: the
    /// wait that was broken least often, so that every wait has its turn although steps queued behind a fault break nothing.
    pub fn next(&self, rows: u32, drafts: u32) -> Option<usize> {
        let broken = self.broken();
        let times = |at: &usize| broken[*at].values().sum::<u32>();
        let own = |wait: &Wait| wait.rows == rows && wait.drafts == drafts;
        (0..self.waits.len()).filter(|at| own(&self.waits[*at])).min_by_key(times)
    }

    /// Counts a fault of a step: for the wait that a test has broken in it, or as one that no broken wait explains. `call` is
    /// the number of the call that waited too long, and `token` that of the first token lost; steps that run ahead of
    /// outputs that are done lose none and do not count.
    pub fn note_fault(&self, broken: Option<usize>, call: u32, token: Option<u32>) {
        if let Some((wait, token)) = self.note_quietly(broken, call, token) {
            let Wait { call, tag, rows, drafts, .. } = &self.waits[wait];
            tracing::warn!(wait, call, tag, rows, drafts, token, "a test has broken this call");
        }
    }

    /// Counts a fault like [`Injections::note_fault`], without a line in the log. Returns the wait and the token for which it
    /// counts.
    pub fn note_quietly(&self, broken: Option<usize>, call: u32, token: Option<u32>) -> Option<(usize, u32)> {
        // Calls behind the broken one miss their words as well, and may be the first to say so.
        let Some(wait) = broken.filter(|wait| self.waits[*wait].number <= call) else {
            self.note_other();
            return None;
        };
        let token = token?;
        self.note(wait, token);
        Some((wait, token))
    }

    /// Joins those of the stages of a split replica; a stage's waits follow those of the stage before.
    pub fn joined<'a>(stages: impl IntoIterator<Item = &'a Injections>) -> Injections {
        let (mut waits, mut every) = (Vec::new(), 0);
        for stage in stages {
            waits.extend(stage.waits.iter().cloned());
            every = stage.every();
        }
        Injections::new(waits, every)
    }

    /// Records that the step of a wait's turn has faulted, and the first output that lost its token `token` by it.
    pub fn note(&self, wait: usize, token: u32) {
        *self.broken()[wait].entry(token).or_default() += 1;
    }

    /// Records a fault that no broken wait explains.
    pub fn note_other(&self) {
        self.others.fetch_add(1, Relaxed);
    }

    /// Returns the number of faults that no broken wait explains.
    pub fn others(&self) -> u32 {
        self.others.load(Relaxed)
    }

    /// Records that a plan that draws tokens was queued behind a faulted step: one in which prompts end, or one that
    /// verifies drafts, or another.
    pub fn note_behind(&self, prompts: bool, drafts: bool) {
        self.prompts_behind.fetch_add(prompts.into(), Relaxed);
        self.drafts_behind.fetch_add(drafts.into(), Relaxed);
        if drafts && !self.waits.is_empty() {
            tracing::warn!("a plan that verifies drafts was queued behind a faulted step");
        }
    }

    /// Returns the number of plans behind a faulted step in which prompts ended, and of those that verified drafts.
    pub fn behind(&self) -> (u32, u32) {
        (self.prompts_behind.load(Relaxed), self.drafts_behind.load(Relaxed))
    }

    /// Returns a wait.
    pub fn wait(&self, wait: usize) -> &Wait {
        &self.waits[wait]
    }

    /// Returns all waits, and at which tokens they have been broken so far.
    pub fn seen(&self) -> Vec<(Wait, BrokenAt)> {
        self.waits.iter().cloned().zip(self.broken().iter().cloned()).collect()
    }

    fn broken(&self) -> MutexGuard<'_, Vec<BrokenAt>> {
        // Poisoning is ignored: each change is one count.
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wait_of_a_step_has_its_turn() {
        let wait = |rows, call: &str| Wait { rows, drafts: 0, number: 1, call: call.to_owned(), tag: "x_tag" };
        let verifying = Wait { drafts: 3, ..wait(8, "b") };
        let waits = vec![wait(1, "a"), wait(8, "a"), wait(1, "b"), wait(1, "c"), verifying];
        let injections = Injections::new(waits, 3);
        assert_eq!(injections.next(2, 0), None);
        assert_eq!(
            [(8, 0), (8, 1), (8, 3)].map(|(rows, drafts)| injections.next(rows, drafts)),
            [Some(1), None, Some(4)]
        );
        let turns: Vec<usize> = (0..5)
            .map(|token| {
                let turn = injections.next(1, 0).expect("there are waits");
                assert_eq!(injections.next(1, 0), Some(turn), "a turn that broke nothing is taken again");
                injections.note(turn, token);
                turn
            })
            .collect();
        assert_eq!(turns, [0, 2, 3, 0, 2]);
        let seen = injections.seen();
        assert_eq!(seen[0], (wait(1, "a"), BTreeMap::from([(0, 1), (3, 1)])));
        assert_eq!(seen[1], (wait(8, "a"), BTreeMap::new()));
    }
}
