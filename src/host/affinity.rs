//! Chooses the replica of a model for a prompt: one that received the prompt's beginning before, because its KV pages
//! may still be cached there, unless that replica is too busy, or has no free slot while another one has; otherwise the
//! least busy. A pure state machine: page keys and loads in, a replica out.
//! Not here: what the replicas really keep in their caches, which only they know.

use crate::engine::prefix::PageKey;
use std::collections::HashMap;

/// The maximum number of pages remembered per model: two million tokens, in about six megabytes.
const PAGES: usize = 1 << 17;
/// The number of known pages that outweighs one additional request: 256 tokens. Computing these tokens again takes
/// about as long as four decode steps (19,712 against 287 tokens per second, an 8 B model in docs/performance.md). One
/// more row in a batch costs the other rows about as much over the two hundred steps of an answer, at one or two
/// percent per step.
const PAGES_PER_REQUEST: usize = 16;
/// The maximum number of requests by which a replica may be busier than the least busy one and still be chosen for its
/// known pages, however many they are. The pages save time only once, while a request behind this many others waits
/// although another replica is nearly idle.
const MOST_AHEAD: u32 = 8;

/// A replica that a request can be sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The replica's index in the model's list.
    pub replica: usize,
    /// Whether the replica would accept the request now.
    pub ready: bool,
    /// The number of requests that run or wait on the replica.
    pub unfinished: u32,
    /// The number of requests that can run on the replica at once.
    pub slots: u32,
    /// The used share of the KV pages in tenths. Smaller differences do not matter.
    pub pages_tenths: u32,
}

impl Candidate {
    /// Whether a new request would have to wait for another one to end. That takes longer than computing any prompt, so
    /// no number of known pages outweighs it.
    fn full(&self) -> bool {
        self.unfinished >= self.slots
    }
}

/// A record of the prompts that a model's replicas received recently.
#[derive(Debug)]
pub(super) struct Affinity {
    /// Page key → bit set of the replicas that received the page; replicas from the 65th on are not recorded. A page
    /// that occurs again moves to `young`. When `young` is full, it becomes `old`, and the previous `old` is discarded.
    young: HashMap<PageKey, u64>,
    old: HashMap<PageKey, u64>,
    /// The capacity of each of the two maps, in pages.
    half: usize,
    /// The turn in which each replica last received a request. Among equal replicas, the one with the earliest turn is
    /// chosen.
    given: Vec<u64>,
    turn: u64,
}

impl Default for Affinity {
    fn default() -> Affinity {
        Affinity::new(PAGES)
    }
}

impl Affinity {
    /// Creates a record of at most `pages` pages, of which at least the most recent half is always kept.
    pub(super) fn new(pages: usize) -> Affinity {
        let half = (pages / 2).max(1);
        Affinity { young: HashMap::new(), old: HashMap::new(), half, given: Vec::new(), turn: 0 }
    }

    /// Returns the replica for a prompt whose full pages have the keys `keys`, and records the choice. Returns `None`
    /// if there are no candidates. A candidate that is not ready is only chosen if none is ready.
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

    /// Returns the number of recorded pages.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Returns whether no pages are recorded.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn holders(&self, key: &PageKey) -> u64 {
        // An entry in `young` includes the replicas that it had in `old`.
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

/// Returns the number of requests by which a replica that received the first `pages` pages of a prompt may be busier
/// than the least busy one.
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
    use crate::kernels::attention::PAGE_TOKENS;

    /// The number of tokens of a page.
    const PAGE: usize = PAGE_TOKENS as usize;

    /// Returns ready candidates with the given numbers of unfinished requests.
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

    /// Returns the keys of a prompt: `shared` pages that all prompts have, followed by `pages` pages that only `prompt`
    /// has.
    fn keys(prompt: u32, shared: usize, pages: usize) -> Vec<PageKey> {
        let tokens: Vec<u32> =
            (0..(shared + pages) * PAGE).map(|at| if at < shared * PAGE { 0 } else { prompt + 1 }).collect();
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
        // With equal numbers of requests, the used pages decide.
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
                // The conversation so far is the beginning of the next prompt.
                let longer = keys(talk, 0, 8 * round);
                assert_eq!(affinity.choose(&idle, &longer), Some(homes[talk as usize]));
            }
        }
        // The same tokens under another cache salt have other keys.
        let foreign = page_keys("other", &[1; 8 * PAGE]);
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
            // Now both replicas received the prompt.
            assert_eq!(again(bearable), Some(1), "{pages} pages: the less busy of two that hold them");
        }
    }

    /// Goal: all replicas get work although all prompts share a long beginning. Method: route 400 such prompts while no
    /// request ends.
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
        // More requests on a replica with more slots do not mean a longer wait.
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
        // A device selector leaves fewer candidates; pages on other replicas then do not matter.
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
        // One prompt with more pages than the record can hold.
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
