//! Where a recording needs barriers: a pure function of what its operations touch.
//! Deliberately absent: which barrier a queue understands (`region`).

use super::recording::{Access, Op, Range};

/// Whether a barrier must stand before each operation: an operation that reads or writes
/// what an earlier one since the last barrier wrote, or writes what one read, gets one.
/// The barrier is global, so it clears everything before it. The list starts unsynchronised
/// with whatever ran before: the region's own start is the caller's.
pub fn derive(ops: &[Op]) -> Vec<bool> {
    let mut pending: Vec<(Range, Access)> = Vec::new();
    ops.iter()
        .map(|op| {
            let accesses = op.accesses();
            let needed = accesses
                .iter()
                .any(|(range, access)| pending.iter().any(|(before, did)| hazard(before, *did, range, *access)));
            if needed {
                pending.clear();
            }
            pending.extend(accesses.into_iter().filter(|(range, _)| range.bytes > 0));
            needed
        })
        .collect()
}

fn hazard(before: &Range, did: Access, range: &Range, does: Access) -> bool {
    (did.writes() || does.writes()) && before.overlaps(range)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::recording::{Arg, BufferId, Call};
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

    fn conflict(a: &Op, b: &Op) -> bool {
        a.accesses()
            .iter()
            .any(|(x, xa)| b.accesses().iter().any(|(y, ya)| x.overlaps(y) && (xa.writes() || ya.writes())))
    }

    proptest! {
        /// No hazard is left: between any two conflicting operations stands a barrier.
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

        /// No barrier is without a hazard: each one separates a conflicting pair since the previous one.
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
}
