//! Tests of the submission order: examples, and random programs compared with a model queue.

use super::*;
use Role::{Compute, Transfer};

fn point(role: Role, value: u64) -> Point {
    Point { role, value }
}

fn both() -> Lanes<&'static str> {
    Lanes::new(&[Compute, Transfer])
}

#[test]
fn what_waits_for_nothing_goes_at_once() {
    let mut lanes = both();
    assert_eq!(lanes.enqueue(Compute, 1, &[], "a"), Ok(vec![(Compute, "a")]));
    assert_eq!(lanes.enqueue(Compute, 3, &[point(Compute, 1)], "b"), Ok(vec![(Compute, "b")]));
    assert_eq!(lanes.reserved(Compute), 4);
}

#[test]
fn a_wait_for_a_later_signal_is_held_until_that_signal_and_the_lane_keeps_its_order() {
    let mut lanes = both();
    assert_eq!(lanes.enqueue(Compute, 1, &[point(Transfer, 2)], "a"), Ok(vec![]));
    assert_eq!(lanes.enqueue(Compute, 1, &[], "b"), Ok(vec![]), "b must not overtake a");
    assert_eq!(lanes.enqueue(Transfer, 1, &[], "t1"), Ok(vec![(Transfer, "t1")]), "value 1 is not 2");
    assert_eq!(lanes.deferred(), 2);
    let ready = lanes.enqueue(Transfer, 1, &[], "t2");
    assert_eq!(ready, Ok(vec![(Transfer, "t2"), (Compute, "a"), (Compute, "b")]));
    assert_eq!(lanes.deferred(), 0);
}

#[test]
fn one_release_may_release_the_next() {
    let mut lanes = both();
    assert_eq!(lanes.enqueue(Compute, 1, &[point(Transfer, 1)], "c1"), Ok(vec![]));
    assert_eq!(lanes.enqueue(Compute, 1, &[point(Transfer, 2)], "c2"), Ok(vec![]));
    let ready = lanes.enqueue(Transfer, 1, &[], "t1");
    assert_eq!(ready, Ok(vec![(Transfer, "t1"), (Compute, "c1")]));
    // t2 waits for c1, which has been submitted; c2 waits for t2.
    let ready = lanes.enqueue(Transfer, 1, &[point(Compute, 1)], "t2");
    assert_eq!(ready, Ok(vec![(Transfer, "t2"), (Compute, "c2")]));
}

#[test]
fn another_hardware_queue_holds_nothing_back() {
    let mut lanes = Lanes::new(&[Compute]);
    assert_eq!(lanes.enqueue(Compute, 1, &[point(Transfer, 7)], "a"), Ok(vec![(Compute, "a")]));
}

#[test]
fn waiting_for_oneself_is_refused_and_changes_nothing() {
    let mut lanes = both();
    let refused = lanes.enqueue(Compute, 1, &[point(Compute, 1)], "a");
    assert_eq!(refused.map_err(|n| n.wait), Err(point(Compute, 1)));
    assert_eq!((lanes.reserved(Compute), lanes.deferred()), (0, 0));
}

#[test]
fn a_circle_is_refused_and_changes_nothing() {
    let mut lanes = both();
    assert_eq!(lanes.enqueue(Compute, 1, &[point(Transfer, 1)], "c"), Ok(vec![]));
    let refused = lanes.enqueue(Transfer, 1, &[point(Compute, 1)], "t");
    assert!(refused.is_err_and(|n| n.reason.contains("waits for it")));
    assert_eq!((lanes.reserved(Transfer), lanes.deferred()), (0, 1));
    assert_eq!(lanes.enqueue(Transfer, 1, &[], "t"), Ok(vec![(Transfer, "t"), (Compute, "c")]));
}

#[test]
fn a_circle_behind_the_head_is_refused_too() {
    let mut lanes = both();
    // c1 waits for t2, and t1 is not reserved yet: no cycle so far.
    assert_eq!(lanes.enqueue(Compute, 1, &[point(Transfer, 2)], "c1"), Ok(vec![]));
    assert_eq!(lanes.enqueue(Compute, 1, &[], "c2"), Ok(vec![]));
    // t1 waits for c2, which is behind c1, which waits for t2, which would be behind t1.
    assert_eq!(lanes.enqueue(Transfer, 1, &[point(Compute, 2)], "t1"), Ok(vec![]));
    let refused = lanes.enqueue(Transfer, 1, &[], "t2");
    assert!(refused.is_err());
}

proptest::proptest! {
    /// Goal: no batch is submitted before a signal of its own queue that it waits for, each lane keeps its order, and
    /// the first held batch of a lane has an unsubmitted wait. Method: random batches are offered, and a model queue
    /// records which values were signalled.
    #[test]
    fn a_queue_never_waits_for_its_future(
        steps in proptest::collection::vec((0..2usize, 1..4u64, proptest::collection::vec((0..2usize, 0..12u64), 0..3)), 1..40)
    ) {
        let mut lanes = Lanes::new(&[Compute, Transfer]);
        let mut signalled = [0u64; 2];
        let mut given = 0;
        let mut gone = 0;
        for (role, signals, waits) in steps {
            let role = Role::ALL[role];
            let waits: Vec<Point> = waits.into_iter().map(|(r, v)| point(Role::ALL[r], v)).collect();
            let first = lanes.reserved(role) + 1;
            let batch = (first, first + signals - 1, waits.clone());
            let Ok(ready) = lanes.enqueue(role, signals, &waits, batch) else { continue };
            given += 1;
            for (role, (first, last, waits)) in ready {
                gone += 1;
                proptest::prop_assert_eq!(first, signalled[role.index()] + 1, "out of order");
                for wait in waits {
                    proptest::prop_assert!(wait.value <= signalled[wait.role.index()], "waits for {wait}");
                }
                signalled[role.index()] = last;
            }
            proptest::prop_assert_eq!(lanes.deferred(), given - gone, "lost or doubled");
            for lane in Role::ALL {
                if let Some(head) = lanes.held[lane.index()].front() {
                    let open = head.waits.iter().any(|w| w.value > signalled[w.role.index()]);
                    proptest::prop_assert!(open, "held without a reason");
                }
            }
        }
    }
}
