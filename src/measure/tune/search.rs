//! The search for the fastest choices of one kind of step after the other: each value of a choice is timed in whole steps,
//! and the fastest ones alternate with the current value.
//! Not here: the choices and their values (`knobs`), running steps (`bench`), and comparing them (`compare`).

use super::bench::Bench;
use super::compare::{DUELLED, Logits, ROUNDING, ROUNDING_OF_ROWS, faster, median, same};
use super::knobs;
use super::knobs::{Knob, LIMITS, nearest_first};
use super::{StepOutcome, TuneEvent};
use crate::gpu::error::StartError;
use crate::gpu::tuned;
use crate::gpu::tuned::{Tuned, TuningBounds};
use crate::host::progress::{Progress, Unit};
use crate::kernels::gemm::matmul::Arithmetic;
use crate::kernels::region::Region;
use crate::model::decoder::{StepShape, Tuning};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The number of steps that time one value before it is compared with the current one.
const SCREENED: usize = 7;
/// The number of values of a choice, the fastest ones, that are compared with the current one.
const DUELS: usize = 3;
/// The maximum number of passes over all choices of a step; its search ends earlier if a pass finds nothing.
const PASSES: usize = 3;
/// Kernels that a step does not use are given up if it takes this many times as long with their default choices.
const HOPELESS: f64 = 2.0;

/// A step's time is divided among the kernels that it may use by the number of their values. A kernel counts for at least one in
/// so many of all values.
const LEAST_SHARE: usize = 8;

/// The entries that were found, by kind of step as the file names it (`tuned::variant`); `None` for a default value.
pub(super) type Found = BTreeMap<String, BTreeMap<String, Option<String>>>;

/// The state of a search: the choices so far, the best tuning of the current step, and the means to try others.
pub(super) struct Search<'a, 'b> {
    pub(super) bench: Bench<'a>,
    pub(super) bounds: TuningBounds,
    /// The tuning with the default choices.
    pub(super) rules: Tuning,
    /// What an earlier search has kept, which is tried first.
    pub(super) kept: &'b Tuned,
    /// Changes of the tuning that the search keeps.
    pub(super) fixed: &'b [String],
    /// The context before the steps.
    pub(super) depth: u32,
    /// The maximum number of values of a choice that are tried per pass.
    pub(super) candidates: usize,
    pub(super) clock: SearchClock<'b>,
    pub(super) say: &'b mut dyn FnMut(&TuneEvent),
    /// The values that differ from the default ones, by key.
    pub(super) chosen: BTreeMap<String, String>,
    pub(super) found: Found,
    /// The kinds of steps that were searched.
    pub(super) done: Vec<StepShape>,
}

/// A tuning of a step, and the step.
#[derive(Clone)]
struct Candidate {
    tuning: Tuning,
    region: Arc<Region>,
}

/// The search for one kind of step.
struct StepSearch<'s, 'a, 'b> {
    search: &'s mut Search<'a, 'b>,
    shape: StepShape,
    variant: String,
    best: Candidate,
    reference: Logits,
    tried: usize,
    complete: bool,
    /// Improvements that are reported only if the choice that they depend on is adopted.
    held: Option<Vec<TuneEvent>>,
}

/// A change of one of [`LIMITS`].
struct LimitChange {
    knob: Knob,
    old: String,
    new: String,
}

/// Reports how much of a search's time has passed.
pub(super) struct SearchClock<'a> {
    pub(super) until: Instant,
    pub(super) time: Duration,
    pub(super) progress: &'a dyn Progress,
}

impl SearchClock<'_> {
    const WHAT: &'static str = "searching, seconds";

    fn tick(&self) {
        let left = self.until.saturating_duration_since(Instant::now());
        let passed = self.time.saturating_sub(left).as_secs();
        // The end is reported once, by `end`.
        let total = self.time.as_secs().max(1);
        self.progress.step(SearchClock::WHAT, passed.min(total - 1), total, Unit::Count);
    }

    pub(super) fn end(&self) {
        let total = self.time.as_secs().max(1);
        self.progress.step(SearchClock::WHAT, total, total, Unit::Count);
    }
}

impl<'a, 'b> Search<'a, 'b> {
    /// Searches the choices of one kind of step until a deadline.
    pub(super) fn step(&mut self, shape: StepShape, until: Instant) -> Result<StepOutcome, StartError> {
        self.bench.begin(shape)?;
        let (rules, reference) = self.bench.reference(self.rules.clone())?;
        let by_rules = Candidate { region: self.bench.region(&rules)?, tuning: rules };
        let us = self.bench.steady_us(&by_rules.region)?;
        let variant = tuned::variant(&by_rules.tuning);
        (self.say)(&TuneEvent::Began { step: shape, variant: variant.clone(), us });

        let before = self.chosen.clone();
        let best = by_rules.clone();
        let mut step =
            StepSearch { search: self, shape, variant, best, reference, tried: 0, complete: true, held: None };
        step.take_chosen()?;
        let own = step.knobs(until)?;
        let mut outcome =
            StepOutcome { step: shape, before_us: us, after_us: us, tried: step.tried, complete: step.complete };
        let StepSearch { variant, best, reference, .. } = step;
        if !Arc::ptr_eq(&best.region, &by_rules.region) {
            let times = self.bench.times(&[&by_rules.region, &best.region], DUELLED)?;
            outcome.before_us = median(&times[0]);
            outcome.after_us = median(&times[1]);
            let right = self.bench.logits(&best.region)?.and_then(|logits| same(&reference, &logits, ROUNDING));
            if let Err(what) = &right {
                self.wrong(shape, ("everything", "together"), what.clone());
            }
            if self.chosen != before && (right.is_err() || outcome.after_us >= outcome.before_us) {
                // The logits of all changes together are wrong, or their gains do not add up: nothing is kept.
                outcome.after_us = outcome.before_us;
                self.chosen = before;
            }
        }
        let found = self.found.entry(variant).or_default();
        for knob in own {
            let value = self.chosen.get(&knob.key).filter(|value| **value != knob.rule);
            found.insert(knob.entry, value.cloned());
        }
        self.done.push(shape);
        Ok(outcome)
    }

    fn wrong(&mut self, step: StepShape, (name, value): (&str, &str), what: String) {
        (self.say)(&TuneEvent::Wrong { step, name: name.to_owned(), value: value.to_owned(), what });
    }

    /// Returns the numbers of rows of the decode steps that were searched.
    fn earlier_rows(&self) -> Vec<u32> {
        let rows = |step: &StepShape| if let StepShape::Decode { rows } = step { Some(*rows) } else { None };
        self.done.iter().filter_map(rows).filter(|rows| *rows > 1).collect()
    }
}

impl StepSearch<'_, '_, '_> {
    /// Begins with what the searches of other steps have chosen; if the results are wrong with it, without all of it.
    fn take_chosen(&mut self) -> Result<(), StartError> {
        let mut tuning = self.best.tuning.clone();
        for (key, value) in &self.search.chosen {
            tuning = self.search.bounds.changed(&tuning, key, value).unwrap_or(tuning);
        }
        if tuning == self.best.tuning {
            return Ok(());
        }
        let right = match self.search.bench.regions(std::slice::from_ref(&tuning))?.pop().flatten() {
            None => Err("it cannot be built".to_owned()),
            Some(region) => {
                let (switches, most) = self.difference(&tuning);
                let logits = self.search.bench.logits(&region)?;
                let right = logits.and_then(|logits| same(&self.reference, &logits, most).map(|()| logits));
                right.map(|logits| (Candidate { tuning, region }, Some(logits).filter(|_| switches)))
            }
        };
        match right {
            Ok((best, reference)) => {
                self.best = best;
                self.reference = reference.unwrap_or_else(|| std::mem::take(&mut self.reference));
            }
            Err(what) => {
                self.search.wrong(self.shape, ("everything", "of the steps before"), what);
                self.search.chosen.clear();
                self.search.found.values_mut().flat_map(BTreeMap::values_mut).for_each(|value| *value = None);
            }
        }
        Ok(())
    }

    /// Returns whether the step's products use other kernels with another tuning, and the maximum difference between the logits:
    /// `matmul` may round rows of activations.
    fn difference(&self, other: &Tuning) -> (bool, f64) {
        let kernels = [&self.best.tuning, other].map(|tuning| self.kernels(tuning));
        let switches = kernels[0] != kernels[1];
        let rounds =
            kernels.iter().flatten().any(|name| name.starts_with("matmul")) && other.arithmetic != Arithmetic::F32;
        (switches, if switches && rounds { ROUNDING_OF_ROWS } else { ROUNDING })
    }

    /// Returns the kernels of the step's row-major products.
    fn kernels(&self, tuning: &Tuning) -> Vec<&'static str> {
        knobs::product_kernels(&self.search.bench.decoder, tuning, self.shape)
    }

    /// Searches the step's choices: first those of its kernels, then those of other kernels for its products. Returns them.
    fn knobs(&mut self, until: Instant) -> Result<Vec<Knob>, StartError> {
        let mut own = self.list(&self.best.tuning);
        let others = self.other_kernels();
        let before = knobs::limits(&self.best.tuning);
        let tried = |knobs: &[Knob]| -> usize {
            1 + knobs.iter().map(|knob| knob.candidates.len().min(self.search.candidates)).sum::<usize>()
        };
        // Of the remaining time, the kernels get shares by their numbers of values, but at least a part to be tried at all.
        let mut shares = vec![tried(&own)];
        for limits in &others {
            let knobs = self.with_limits(*limits).map(|(tuning, _)| self.new_choices(&tuning));
            shares.push(tried(&knobs.unwrap_or_default()));
        }
        let least = shares.iter().sum::<usize>().div_ceil(LEAST_SHARE);
        shares.iter_mut().for_each(|share| *share = least.max(*share));
        let mut left: usize = shares.iter().sum();
        let mut deadline = |share: usize| {
            let now = Instant::now();
            let part = share as f64 / left as f64;
            left -= share;
            now + until.saturating_duration_since(now).mul_f64(part)
        };
        self.passes(&own, deadline(shares[0]))?;
        for (limits, share) in others.iter().zip(&shares[1..]) {
            let found = self.try_kernels(*limits, deadline(*share))?;
            // What other kernels have been given is no default.
            let new = |knob: &Knob| own.iter().all(|own| own.key != knob.key);
            let found: Vec<Knob> = found.into_iter().filter(new).collect();
            own.extend(found);
        }
        let rules = knobs::limits(&self.search.rules);
        for (index, key) in LIMITS.iter().enumerate() {
            if others.iter().any(|limits| limits[index] != before[index]) {
                own.extend(knobs::limit(&self.search.bench.decoder, key, rules[index]));
            }
        }
        Ok(own)
    }

    /// Returns the choices of the step with a tuning, without those that are given or that earlier steps have made.
    fn list(&self, tuning: &Tuning) -> Vec<Knob> {
        let Search { bench, bounds, depth, .. } = &*self.search;
        let mut knobs = knobs::knobs(&bench.decoder, tuning, *bounds, *depth, self.shape);
        let earlier = |knob: &Knob| self.search.found.values().any(|found| found.contains_key(&knob.entry));
        knobs.retain(|knob| !self.is_given(knob) && !earlier(knob));
        knobs
    }

    /// Returns the choices that the step has with a tuning and not as it is.
    fn new_choices(&self, tuning: &Tuning) -> Vec<Knob> {
        let current = self.list(&self.best.tuning);
        let mut knobs = self.list(tuning);
        knobs.retain(|knob| current.iter().all(|own| own.key != knob.key));
        knobs
    }

    fn is_given(&self, knob: &Knob) -> bool {
        self.search.fixed.iter().any(|change| knob.is_set_by(change))
    }

    /// Returns the values of [`LIMITS`] with which the step's products use other kernels, each time others.
    fn other_kernels(&self) -> Vec<[u32; 2]> {
        let tuning = &self.best.tuning;
        let StepShape::Decode { rows } = self.shape else { return Vec::new() };
        if tuning.fragments.is_some() {
            return Vec::new();
        }
        let mut seen = vec![self.kernels(tuning)];
        let mut others = knobs::other_limits(knobs::limits(tuning), rows, &self.search.earlier_rows());
        others.retain(|limits| {
            let kernels = self.with_limits(*limits).map(|(tuning, _)| self.kernels(&tuning));
            let new = kernels.filter(|kernels| !seen.contains(kernels));
            seen.extend(new.clone());
            new.is_some()
        });
        others
    }

    /// Returns the best tuning with other values of [`LIMITS`], and what changes; `None` if one of them is given or cannot be set.
    fn with_limits(&self, limits: [u32; 2]) -> Option<(Tuning, Vec<LimitChange>)> {
        let Search { bench, bounds, rules, .. } = &*self.search;
        let (mut tuning, mut changes) = (self.best.tuning.clone(), Vec::new());
        let (current, rules) = (knobs::limits(&tuning), knobs::limits(rules));
        for (index, key) in LIMITS.iter().enumerate().filter(|(index, _)| limits[*index] != current[*index]) {
            let knob = knobs::limit(&bench.decoder, key, rules[index]).filter(|knob| !self.is_given(knob))?;
            let [old, new] = [current[index], limits[index]].map(|limit| limit.to_string());
            tuning = bounds.changed(&tuning, key, &new)?;
            changes.push(LimitChange { knob, old, new });
        }
        Some((tuning, changes))
    }

    /// Searches the choices of other kernels for the step's products until a deadline, and adopts these kernels if they are faster
    /// with them. Returns these choices.
    fn try_kernels(&mut self, limits: [u32; 2], until: Instant) -> Result<Vec<Knob>, StartError> {
        let Some((tuning, changes)) = self.with_limits(limits) else { return Ok(Vec::new()) };
        if Instant::now() >= until {
            self.complete = false;
            return Ok(Vec::new());
        }
        let Some(region) = self.search.bench.regions(std::slice::from_ref(&tuning))?.pop().flatten() else {
            return Ok(Vec::new());
        };
        self.tried += 1;
        let times = self.search.bench.times(&[&self.best.region, &region], SCREENED)?;
        if median(&times[1]) > HOPELESS * median(&times[0]) {
            return Ok(Vec::new());
        }
        let (_, most) = self.difference(&tuning);
        let right = self.search.bench.logits(&region)?;
        let logits = match right.and_then(|logits| same(&self.reference, &logits, most).map(|()| logits)) {
            Ok(logits) => logits,
            Err(what) => {
                for LimitChange { knob, new, .. } in &changes {
                    self.search.wrong(self.shape, (&knob.key, new), what.clone());
                }
                return Ok(Vec::new());
            }
        };

        let knobs = self.new_choices(&tuning);
        let old = (self.best.clone(), self.reference.clone(), self.search.chosen.clone());
        (self.best, self.reference) = (Candidate { tuning, region }, logits);
        self.held = Some(Vec::new());
        self.passes(&knobs, until)?;
        let held = self.held.take().unwrap_or_default();
        let times = self.search.bench.times(&[&old.0.region, &self.best.region], DUELLED)?;
        if !faster(&times[0], &times[1]) {
            (self.best, self.reference, self.search.chosen) = old;
            return Ok(knobs);
        }
        held.iter().for_each(|event| (self.search.say)(event));
        for LimitChange { knob, old, new } in &changes {
            self.adopt(knob, old, new, &times);
        }
        Ok(knobs)
    }

    /// Searches choices in turn until a deadline, several times if values are found.
    fn passes(&mut self, knobs: &[Knob], until: Instant) -> Result<(), StartError> {
        for pass in 0..PASSES {
            let mut improved = false;
            for (index, knob) in knobs.iter().enumerate() {
                let now = Instant::now();
                if now >= until {
                    self.complete = false;
                    return Ok(());
                }
                // Each choice gets an equal share of the remaining time.
                let share = (until - now) / (knobs.len() - index) as u32;
                let current = self.search.chosen.get(&knob.key).unwrap_or(&knob.rule).clone();
                let kept = self.search.kept.value(&self.variant, &knob.key).filter(|_| pass == 0);
                let mut values = nearest_first(&knob.candidates, &current, kept);
                values.truncate(self.search.candidates);
                improved |= self.turn(knob, &current, &values, now + share)?;
            }
            if !improved || !self.complete {
                break;
            }
        }
        Ok(())
    }

    /// Tries values of one choice until a deadline. Returns whether one was adopted.
    fn turn<'v>(
        &mut self,
        knob: &Knob,
        current: &str,
        values: &'v [String],
        until: Instant,
    ) -> Result<bool, StartError> {
        let at_once = std::thread::available_parallelism().map_or(1, |n| n.get());
        let incumbent = median(&self.search.bench.times(&[&self.best.region], SCREENED)?[0]);
        let mut screened: Vec<(f64, &String, Candidate)> = Vec::new();
        'values: for some in values.chunks(at_once) {
            if Instant::now() >= until {
                self.complete = false;
                break;
            }
            let changed =
                |value: &'v String| Some((value, self.search.bounds.changed(&self.best.tuning, &knob.key, value)?));
            let changed: Vec<(&String, Tuning)> = some.iter().filter_map(changed).collect();
            let tunings: Vec<Tuning> = changed.iter().map(|(_, tuning)| tuning.clone()).collect();
            for ((value, tuning), region) in changed.into_iter().zip(self.search.bench.regions(&tunings)?) {
                // A tuning that the driver cannot build is not a candidate.
                let Some(region) = region else { continue };
                if Instant::now() >= until {
                    self.complete = false;
                    break 'values;
                }
                self.tried += 1;
                self.search.clock.tick();
                let us = median(&self.search.bench.times(&[&region], SCREENED)?[0]);
                if us < incumbent {
                    screened.push((us, value, Candidate { tuning, region }));
                }
            }
        }
        screened.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (_, value, candidate) in screened.into_iter().take(DUELS) {
            let times = self.search.bench.times(&[&self.best.region, &candidate.region], DUELLED)?;
            if !faster(&times[0], &times[1]) {
                continue;
            }
            let right = self.search.bench.logits(&candidate.region)?;
            match right.and_then(|logits| same(&self.reference, &logits, ROUNDING)) {
                Err(what) => self.search.wrong(self.shape, (&knob.key, value), what),
                Ok(()) => {
                    self.best = candidate;
                    self.adopt(knob, current, value, &times);
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Notes and reports a value that is faster, by the times with the old value and with the new one.
    fn adopt(&mut self, knob: &Knob, old: &str, new: &str, times: &[Vec<f64>]) {
        self.search.chosen.insert(knob.key.clone(), new.to_owned());
        let event = TuneEvent::Improved {
            step: self.shape,
            name: knob.key.clone(),
            old: old.to_owned(),
            new: new.to_owned(),
            before_us: median(&times[0]),
            after_us: median(&times[1]),
        };
        match &mut self.held {
            Some(held) => held.push(event),
            None => (self.search.say)(&event),
        }
    }
}
