//! Barrier placement: where a recording needs barriers, as a pure function of its operations' accesses. Not here: the
//! kind of barrier that is recorded (`region`).

use super::recording::{Access, BufferId, Op, Touch};
use std::collections::BTreeSet;

/// The maximum number of writes to a tagged buffer between two barriers; less than the number of tags (`tags`).
pub const MOST_GENERATIONS: usize = 100;

/// Returns whether a barrier is needed before each operation. An operation gets one if it reads or writes what an
/// earlier operation since the last barrier wrote, or writes what such an operation read. The barrier is global: it
/// orders everything before it. Nothing is assumed about earlier submissions: the caller puts a barrier at the region's
/// start.
///
/// Tagged (carried) words need no barrier between a write and the reads that poll for it. A write over tagged words
/// that an earlier operation reads or wrote needs no barrier either, if the write cannot start before that operation
/// has ended because it polls for data that depends on everything that the operation wrote.
///
/// A call with [`Access::Beside`] needs no barrier for what the calls right before it write: their words are others.
///
/// A tagged buffer is written at most [`MOST_GENERATIONS`] times between two barriers: with more writes the tags would
/// repeat, and a reader could mistake an old word for a new one.
pub fn derive(ops: &[Op]) -> Vec<bool> {
    let mut pending: Vec<(usize, Touch)> = Vec::new();
    let mut flow = Flow::default();
    // The first of the newest operations that write other words than those before them.
    let mut first = 0;
    ops.iter()
        .enumerate()
        .map(|(index, op)| {
            let touches = op.touches();
            if touches.iter().all(|touch| touch.access != Access::Beside) {
                first = index;
            }
            flow.add(index, op, &touches, &pending);
            let generations = |of: BufferId| {
                let writes = |touch: &Touch| touch.carried && touch.access.writes() && touch.range.buffer == of;
                pending.iter().filter(|(_, touch)| writes(touch)).count()
            };
            let needed = touches.iter().any(|now| {
                let repeats = now.carried && now.access.writes() && generations(now.range.buffer) >= MOST_GENERATIONS;
                repeats
                    || pending
                        .iter()
                        .filter(|(earlier, before)| *earlier < first || !beside(before, now))
                        .any(|(earlier, before)| hazard(before, now) && !flow.orders(*earlier, before, now))
            });
            if needed {
                pending.clear();
                flow.forget();
            }
            pending.extend(touches.into_iter().filter(|t| t.range.bytes > 0).map(|t| (index, t)));
            needed
        })
        .collect()
}

fn hazard(before: &Touch, now: &Touch) -> bool {
    (before.access.writes() || now.access.writes()) && before.range.overlaps(&now.range)
}

/// Whether both write, the second one other words than the operations right before it.
fn beside(before: &Touch, now: &Touch) -> bool {
    before.access.writes() && now.access == Access::Beside
}

/// Tracks which operations since the last barrier have ended when the newest operation writes, as ensured by tagged
/// words alone.
#[derive(Default)]
struct Flow {
    /// Per operation: the earlier operations all of whose workgroups its workgroups, taken together, have polled for.
    together: Vec<BTreeSet<usize>>,
    /// Per operation: the earlier operations all of whose workgroups every single one of its workgroups has polled for.
    each: Vec<BTreeSet<usize>>,
}

impl Flow {
    fn add(&mut self, index: usize, op: &Op, touches: &[Touch], pending: &[(usize, Touch)]) {
        let (mut together, mut each) = (BTreeSet::new(), BTreeSet::new());
        let whole = matches!(op, Op::Call(call) if super::waits_for_all(call));
        for now in touches.iter().filter(|t| t.carried && t.access == Access::Read) {
            for (earlier, before) in pending {
                if !(before.carried && before.access.writes() && before.range.overlaps(&now.range)) {
                    continue;
                }
                let theirs = &self.together[*earlier];
                together.insert(*earlier);
                together.extend(theirs);
                if whole {
                    each.insert(*earlier);
                    each.extend(theirs);
                } else {
                    each.extend(&self.each[*earlier]);
                }
            }
        }
        debug_assert_eq!(self.each.len(), index);
        self.together.push(together);
        self.each.push(each);
    }

    /// Clears the sets after a barrier: it orders all earlier operations, and the newest operation depends on none
    /// since.
    fn forget(&mut self) {
        for set in self.together.iter_mut().chain(&mut self.each) {
            set.clear();
        }
    }

    fn orders(&self, earlier: usize, before: &Touch, now: &Touch) -> bool {
        let flows = before.access.writes() && now.access == Access::Read;
        before.carried && now.carried && (flows || self.each.last().is_some_and(|set| set.contains(&earlier)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::recording::{Arg, BufferId, Call, Range};
    use proptest::prelude::*;

    fn op(accesses: &[(u32, u64, u64, Access)]) -> Op {
        Op::Call(Call {
            kernel: "test",
            label: String::new(),
            constants: Vec::new(),
            args: accesses
                .iter()
                .map(|&(buffer, offset, bytes, access)| {
                    Arg::Buffer(Range { buffer: BufferId(buffer), offset, bytes }, access)
                })
                .collect(),
            groups: [1, 1, 1],
        })
    }

    fn access() -> impl Strategy<Value = Access> {
        prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::ReadWrite)]
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let touch = (0u32..4, 0u64..6, 0u64..4, access());
        prop::collection::vec(prop::collection::vec(touch, 1..4), 0..24)
            .prop_map(|list| list.iter().map(|a| op(a)).collect())
    }

    /// Goal: parts of a product need no barrier between them, but one before their reader, before an operation that writes the same
    /// words, and behind one that reads them. Method: parts of one range, in a row and with another operation between them.
    #[test]
    fn parts_beside_one_another_need_no_barrier() {
        let product = |access| op(&[(0, 0, 4, Access::Read), (1, 0, 4, access)]);
        let (first, part) = (product(Access::Write), product(Access::Beside));
        let (reader, writer) = (op(&[(1, 2, 1, Access::Read)]), op(&[(1, 0, 4, Access::Write)]));
        let ops = [first.clone(), part.clone(), part.clone(), reader, part.clone(), writer];
        assert_eq!(derive(&ops), [false, false, false, true, true, true]);
        let other = op(&[(2, 0, 4, Access::Write)]);
        assert_eq!(derive(&[first.clone(), other.clone(), part.clone()]), [false, false, true]);
        assert_eq!(derive(&[other, first, part]), [false, false, false]);
    }

    fn conflict(a: &Op, b: &Op) -> bool {
        a.touches().iter().any(|x| b.touches().iter().any(|y| hazard(x, y)))
    }

    proptest! {
        /// Goal: no hazard is left. Method: random operations; there is a barrier between any two conflicting ones.
        #[test]
        fn every_conflict_is_separated(ops in ops()) {
            let barriers = derive(&ops);
            for i in 0..ops.len() {
                for j in i + 1..ops.len() {
                    if conflict(&ops[i], &ops[j]) {
                        prop_assert!(barriers[i + 1..=j].iter().any(|b| *b), "{i} and {j} conflict without a barrier");
                    }
                }
            }
        }

        /// Goal: no barrier is superfluous. Method: random operations; each barrier separates a conflicting pair since
        /// the previous barrier.
        #[test]
        fn every_barrier_separates_a_conflict(ops in ops()) {
            let barriers = derive(&ops);
            let mut start = 0;
            for j in 0..ops.len() {
                if barriers[j] {
                    prop_assert!((start..j).any(|i| conflict(&ops[i], &ops[j])), "barrier before {j} separates nothing");
                    start = j;
                }
            }
        }
    }

    #[test]
    fn an_empty_range_conflicts_with_nothing() {
        let whole = op(&[(0, 0, 4, Access::Write)]);
        for offset in 0..5 {
            let none = op(&[(0, offset, 0, Access::ReadWrite)]);
            assert!(!conflict(&none, &whole) && !conflict(&whole, &none), "at {offset}");
            assert_eq!(derive(&[whole.clone(), none]), [false, false], "at {offset}");
        }
    }

    #[test]
    fn independent_calls_share_one_barrier() {
        let ops = [
            op(&[(0, 0, 4, Access::Write)]),
            op(&[(0, 0, 4, Access::Read), (1, 0, 4, Access::Write)]),
            op(&[(0, 0, 4, Access::Read), (2, 0, 4, Access::Write)]),
            op(&[(1, 0, 4, Access::Read), (2, 0, 4, Access::Read)]),
        ];
        assert_eq!(derive(&ops), [false, true, false, true]);
    }

    /// Returns a call on buffers of 4 bytes that reads the tagged buffers `reads` and reads and writes the tagged
    /// buffers `writes`.
    fn flow(kernel: &'static str, reads: &[u32], writes: &[u32]) -> Op {
        let range = |&buffer: &u32| Range { buffer: BufferId(buffer), offset: 0, bytes: 4 };
        let args = reads
            .iter()
            .map(|b| Arg::Carried(range(b), Access::Read))
            .chain(writes.iter().map(|b| Arg::Carried(range(b), Access::ReadWrite)))
            .collect();
        Op::Call(Call { kernel, label: String::new(), constants: Vec::new(), args, groups: [1, 1, 1] })
    }

    #[test]
    fn carried_words_that_flow_round_a_layer_need_no_barrier() {
        let (x, qkv, attention, mlp) = (0, 1, 2, 3);
        let layer = [
            flow("skinny.bf16", &[x], &[qkv]),
            flow("attention.f16", &[qkv], &[attention]),
            flow("skinny.bf16", &[attention], &[x]),
            flow("skinny.bf16", &[x], &[mlp]),
            flow("skinny.bf16", &[mlp], &[x]),
        ];
        let layers: Vec<Op> = layer.iter().chain(&layer).chain(&layer).cloned().collect();
        assert_eq!(derive(&layers), vec![false; 15]);
    }

    #[test]
    fn a_write_over_carried_words_waits_for_readers_that_nothing_else_orders() {
        // The writer does not poll for results of the second reader of buffer 0.
        let ops = [flow("skinny.bf16", &[0], &[1]), flow("skinny.bf16", &[0], &[2]), flow("skinny.bf16", &[1], &[0])];
        assert_eq!(derive(&ops), [false, false, true]);
        // Each workgroup of attention polls only for a part of its input, so one of its writes may come too early.
        let ops = [flow("skinny.bf16", &[0], &[1]), flow("attention.f16", &[1], &[0])];
        assert_eq!(derive(&ops), [false, true]);
        let ops = [flow("skinny.bf16", &[0], &[1]), flow("skinny.bf16", &[1], &[0])];
        assert_eq!(derive(&ops), [false, false]);
    }

    #[test]
    fn carried_and_plain_accesses_of_the_same_words_are_separated() {
        let carried = flow("skinny.bf16", &[0], &[1]);
        let plain = op(&[(1, 0, 4, Access::Read)]);
        assert_eq!(derive(&[carried.clone(), plain.clone()]), [false, true]);
        assert_eq!(derive(&[op(&[(0, 0, 4, Access::Write)]), carried]), [false, true]);
    }
}
