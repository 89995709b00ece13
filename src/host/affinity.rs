//! Which of a model's replicas a prompt is given to: one that was given its beginning before, for its pages may still
//! lie there, unless that one is too busy or has no slot free while another has; else the least busy. A pure state
//! machine: page names and loads in, a replica out. Deliberately absent: what the replicas really keep, which only they know.

use crate::engine::prefix::PageKey;
use std::collections::HashMap;

/// Pages that are remembered of a model: two million tokens, in about six megabytes.
const PAGES: usize = 1 << 17;
/// Found pages that outweigh one request more: 256 tokens. Computing so many anew takes about as long as four steps of
/// decoding (19,712 against 287 tokens a second, an 8 B model in docs/performance.md), and one row more in a batch costs
/// the others about that in the two hundred steps of an answer, at a percent or two a step.
const PAGES_PER_REQUEST: usize = 16;
/// However long the beginning that is found, a replica this many requests busier than the least busy is passed by: what
/// is saved is saved once, and behind so many a request would wait while another replica has little to do.
const MOST_AHEAD: u32 = 8;

/// One replica that a request could go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Its place among the model's replicas.
    pub replica: usize,
    /// Whether it would take the request now.
    pub ready: bool,
    /// Requests that run or wait there.
    pub unfinished: u32,
    /// Requests that can run there at once.
    pub slots: u32,
    /// Pages in use, in tenths of all: finer differences decide nothing.
    pub pages_tenths: u32,
}

impl Candidate {
    /// Whether one request more would wait for another's end: that takes longer than any prompt, so no beginning that
    /// is found outweighs it.
    fn full(&self) -> bool {
        self.unfinished >= self.slots
    }
}

/// What was given to a model's replicas lately.
#[derive(Debug)]
pub(super) struct Affinity {
    /// Pages → the replicas that were given them, a bit each (those beyond the 64th are not remembered). What is named
    /// again moves to `young`; when that is full it becomes `old`, and what was old is forgotten.
    young: HashMap<PageKey, u64>,
    old: HashMap<PageKey, u64>,
    /// Pages of one of the two.
    half: usize,
    /// When each replica was last given a request: among equals it is the turn of the one that waited longest.
    given: Vec<u64>,
    turn: u64,
}

impl Default for Affinity {
    fn default() -> Affinity {
        Affinity::new(PAGES)
    }
}

impl Affinity {
    /// Remembers at most `pages`, and at least half of them.
    pub(super) fn new(pages: usize) -> Affinity {
        let half = (pages / 2).max(1);
        Affinity { young: HashMap::new(), old: HashMap::new(), half, given: Vec::new(), turn: 0 }
    }

    /// The replica for a prompt whose full pages have these names, and remembers it; `None` of no candidates. One that
    /// would not take it is chosen only where all are so.
    pub(super) fn choose(&mut self, candidates: &[Candidate], keys: &[PageKey]) -> Option<usize> {
        let any_ready = candidates.iter().any(|candidate| candidate.ready);
        let pool: Vec<Candidate> = candidates.iter().filter(|one| one.ready || !any_ready).copied().collect();
        let least = pool.iter().map(|one| one.unfinished).min()?;
        let all_full = pool.iter().all(Candidate::full);
        let found = (0..keys.len()).rev().find_map(|page| {
            let holders = self.holders(&keys[page]);
            let bearable = least.saturating_add(ahead(page + 1));
            let bears = |one: &&Candidate| one.unfinished <= bearable && (all_full || !one.full());
            self.least_busy(pool.iter().filter(|one| bit(one.replica) & holders != 0).filter(bears))
        });
        let chosen = found.or_else(|| self.least_busy(pool.iter()))?;
        self.remember(chosen, keys);
        Some(chosen)
    }

    /// Pages that are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether none are.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn holders(&self, key: &PageKey) -> u64 {
        // A page that moved to `young` took its replicas along.
        self.young.get(key).or_else(|| self.old.get(key)).copied().unwrap_or(0)
    }

    fn least_busy<'a>(&self, candidates: impl Iterator<Item = &'a Candidate>) -> Option<usize> {
        let given = |replica: usize| self.given.get(replica).copied().unwrap_or(0);
        let busy = |one: &&Candidate| (one.full(), one.unfinished, one.pages_tenths, given(one.replica), one.replica);
        candidates.min_by_key(busy).map(|one| one.replica)
    }

    fn remember(&mut self, replica: usize, keys: &[PageKey]) {
        self.turn += 1;
        if self.given.len() <= replica {
            self.given.resize(replica + 1, 0);
        }
        self.given[replica] = self.turn;
        for key in keys {
            let holders = self.old.remove(key).unwrap_or(0) | bit(replica);
            if self.young.len() >= self.half && !self.young.contains_key(key) {
                self.old = std::mem::take(&mut self.young);
            }
            *self.young.entry(*key).or_default() |= holders;
        }
    }
}

/// By how many requests a replica that was given so many pages of a prompt may be busier than the least busy.
fn ahead(pages: usize) -> u32 {
    u32::try_from(1 + pages / PAGES_PER_REQUEST).unwrap_or(u32::MAX).min(MOST_AHEAD)
}

fn bit(replica: usize) -> u64 {
    u32::try_from(replica).ok().and_then(|replica| 1u64.checked_shl(replica)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::prefix::page_keys;

    /// Replicas by their unfinished requests, all ready.
    fn loads(unfinished: &[u32]) -> Vec<Candidate> {
        let candidate = |(replica, unfinished): (usize, &u32)| Candidate {
            replica,
            ready: true,
            unfinished: *unfinished,
            slots: 1000,
            pages_tenths: 0,
        };
        unfinished.iter().enumerate().map(candidate).collect()
    }

    /// The names of `pages` pages that only `prompt` has, behind `shared` ones that all have.
    fn keys(prompt: u32, shared: usize, pages: usize) -> Vec<PageKey> {
        let tokens: Vec<u32> =
            (0..(shared + pages) * 16).map(|at| if at < shared * 16 { 0 } else { prompt + 1 }).collect();
        page_keys("", &tokens)
    }

    #[test]
    fn equal_load_is_spread_evenly_whether_requests_stay_or_end() {
        for stay in [true, false] {
            let mut affinity = Affinity::default();
            let mut counts = [0u32; 3];
            for prompt in 0..300 {
                let now = if stay { counts } else { [0; 3] };
                let chosen = affinity.choose(&loads(&now), &keys(prompt, 0, 4)).unwrap();
                counts[chosen] += 1;
            }
            assert_eq!(counts, [100; 3], "stay: {stay}");
        }
        // Pages decide where requests do not.
        let mut uneven = loads(&[1, 1]);
        uneven[0].pages_tenths = 3;
        assert_eq!(Affinity::default().choose(&uneven, &[]), Some(1));
        assert_eq!(Affinity::default().choose(&[], &[]), None);
    }

    #[test]
    fn a_conversation_stays_where_it_is_and_others_go_elsewhere() {
        let mut affinity = Affinity::default();
        let idle = loads(&[0, 0, 0]);
        let homes: Vec<usize> = (0..3).map(|talk| affinity.choose(&idle, &keys(talk, 0, 8)).unwrap()).collect();
        assert_eq!(homes, [0, 1, 2]);
        for round in 2..10 {
            for talk in [2, 0, 1, 1] {
                // What was said before is the beginning of what is asked now.
                let longer = keys(talk, 0, 8 * round);
                assert_eq!(affinity.choose(&idle, &longer), Some(homes[talk as usize]));
            }
        }
        // Another tenant's equal tokens are not found.
        let foreign = page_keys("other", &[1; 8 * 16]);
        assert!(foreign.iter().all(|key| affinity.holders(key) == 0));
    }

    #[test]
    fn a_busier_replica_is_preferred_by_as_much_as_was_found_there_and_no_more() {
        for (pages, bearable) in [(1, 1), (15, 1), (16, 2), (64, 5), (112, 8), (4000, 8)] {
            let mut affinity = Affinity::default();
            assert_eq!(affinity.choose(&loads(&[0, 9]), &keys(0, 0, pages)), Some(0));
            let mut again = |busy: u32| affinity.choose(&loads(&[3 + busy, 3]), &keys(0, 0, pages));
            assert_eq!(again(bearable), Some(0), "{pages} pages");
            assert_eq!(again(bearable + 1), Some(1), "{pages} pages");
            // Now both were given it.
            assert_eq!(again(bearable), Some(1), "{pages} pages: the less busy of two that hold them");
        }
    }

    /// All prompts share a long beginning, and nothing ever ends.
    #[test]
    fn a_beginning_that_all_share_does_not_leave_a_replica_without_work() {
        let mut affinity = Affinity::default();
        let mut counts = [0u32; 4];
        for prompt in 0..400 {
            let chosen = affinity.choose(&loads(&counts), &keys(prompt, 200, 2)).unwrap();
            counts[chosen] += 1;
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(most - least <= MOST_AHEAD + 1, "{counts:?} after {prompt}");
        }
        assert_eq!(counts.iter().sum::<u32>(), 400);
        assert!(counts.iter().all(|count| (95..=105).contains(count)), "{counts:?}");
    }

    #[test]
    fn nobody_waits_where_the_beginning_lies_while_another_has_a_slot_free() {
        let mut affinity = Affinity::default();
        let prompt = keys(0, 0, 100);
        let with_slots = |unfinished: &[u32], slots: u32| -> Vec<Candidate> {
            loads(unfinished).into_iter().map(|one| Candidate { slots, ..one }).collect()
        };
        assert_eq!(affinity.choose(&with_slots(&[0, 0], 2), &prompt), Some(0));
        assert_eq!(affinity.choose(&with_slots(&[1, 0], 2), &prompt), Some(0));
        assert_eq!(affinity.choose(&with_slots(&[2, 1], 2), &prompt), Some(1));
        let mut other = Affinity::default();
        assert_eq!(other.choose(&with_slots(&[0, 0], 2), &prompt), Some(0));
        assert_eq!(other.choose(&with_slots(&[3, 2], 2), &prompt), Some(0), "it would wait anywhere");
        // More requests on more slots are not more of a wait.
        let mut uneven = with_slots(&[2, 5], 2);
        uneven[1].slots = 64;
        assert_eq!(Affinity::default().choose(&uneven, &[]), Some(1));
    }

    #[test]
    fn one_that_would_not_take_it_is_chosen_only_where_all_are_so() {
        let mut affinity = Affinity::default();
        let prompt = keys(0, 0, 100);
        assert_eq!(affinity.choose(&loads(&[0, 1]), &prompt), Some(0));
        let mut full = loads(&[0, 50]);
        full[0].ready = false;
        assert_eq!(affinity.choose(&full, &prompt), Some(1));
        full[1].ready = false;
        assert_eq!(affinity.choose(&full, &prompt), Some(0));
        // A selector leaves fewer candidates, and what is held elsewhere does not matter.
        assert_eq!(affinity.choose(&loads(&[0, 50])[1..], &keys(7, 0, 9)), Some(1));
        assert_eq!(affinity.choose(&loads(&[50, 0])[..1], &keys(7, 0, 9)), Some(0));
    }

    #[test]
    fn what_is_remembered_is_bounded_and_what_is_used_is_kept() {
        let mut affinity = Affinity::new(100);
        let idle = loads(&[0, 0]);
        let home = affinity.choose(&idle, &keys(0, 0, 10)).unwrap();
        for prompt in 1..500 {
            affinity.choose(&idle, &keys(prompt, 0, 10));
            assert!(affinity.len() <= 100, "{}", affinity.len());
            assert_eq!(affinity.choose(&idle, &keys(0, 0, 10)), Some(home), "after {prompt}");
        }
        assert_eq!(affinity.holders(&keys(1, 0, 10)[9]), 0, "an old one is forgotten");
        // One prompt of more pages than there is room for.
        affinity.choose(&idle, &keys(1, 0, 1000));
        assert!(affinity.len() <= 100 && !affinity.is_empty(), "{}", affinity.len());
    }

    #[test]
    fn the_same_questions_have_the_same_answers_and_replicas_beyond_the_64th_are_only_loads() {
        let run = || {
            let mut affinity = Affinity::new(500);
            let ask = |n: u32| affinity.choose(&loads(&[n % 5, n % 3, n % 7]), &keys(n % 17, 3, n as usize % 9));
            (0..300).map(ask).collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
        let mut affinity = Affinity::default();
        let mut many = loads(&[1; 70]);
        many[69].unfinished = 0;
        assert_eq!(affinity.choose(&many, &keys(0, 0, 4)), Some(69));
        many[69].unfinished = 1;
        assert_eq!(affinity.choose(&many, &keys(0, 0, 4)), Some(0));
    }
}
