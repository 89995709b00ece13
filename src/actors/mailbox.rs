//! The way to an actor: a bounded channel whose messages end when the actor does. Deliberately absent: threads, and what
//! messages are.
//!
//! A bounded channel of crossbeam keeps what nobody will receive any more for as long as somebody could send to it. With
//! it are kept the ways on which answers would have come, and whoever waits at the other end of one waits for ever.

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The end of whoever sends. The actor's receiver closes when the last one is dropped.
pub struct Address<T> {
    sender: Sender<T>,
    /// To empty what nobody else will.
    messages: Receiver<T>,
    ended: Arc<AtomicBool>,
}

/// The actor's end, a [`Receiver`]. When it is dropped, be it by a panic, every message is that is in it or still comes.
pub struct Mailbox<T> {
    messages: Receiver<T>,
    ended: Arc<AtomicBool>,
}

/// The actor has ended, and the message with it, unless it was among the last that were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended;

/// Why a message was not sent at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There are as many messages as there is room for.
    Full,
    /// As [`Ended`].
    Ended,
}

/// Both ends, with room for so many messages.
pub fn mailbox<T>(capacity: usize) -> (Address<T>, Mailbox<T>) {
    let (sender, messages) = bounded(capacity);
    let ended = Arc::new(AtomicBool::new(false));
    let address = Address { sender, messages: messages.clone(), ended: Arc::clone(&ended) };
    (address, Mailbox { messages, ended })
}

impl<T> Address<T> {
    /// Waits while there is no room.
    pub fn send(&self, message: T) -> Result<(), Ended> {
        // There is a receiver: its own.
        self.sender.send(message).map_err(|_| Ended)?;
        self.arrived()
    }

    /// Never waits.
    pub fn try_send(&self, message: T) -> Result<(), Refused> {
        match self.sender.try_send(message) {
            Ok(()) => self.arrived().map_err(|Ended| Refused::Ended),
            Err(TrySendError::Full(_)) if self.ended.load(Ordering::SeqCst) => Err(Refused::Ended),
            Err(TrySendError::Full(_)) => Err(Refused::Full),
            Err(TrySendError::Disconnected(_)) => Err(Refused::Ended),
        }
    }

    /// A message is in the channel. Either the actor's end, which says so before it empties the channel, finds it there,
    /// or it is seen here that there was an end.
    fn arrived(&self) -> Result<(), Ended> {
        if self.ended.load(Ordering::SeqCst) {
            empty(&self.messages);
            return Err(Ended);
        }
        Ok(())
    }
}

impl<T> Deref for Mailbox<T> {
    type Target = Receiver<T>;

    fn deref(&self) -> &Receiver<T> {
        &self.messages
    }
}

impl<T> Drop for Mailbox<T> {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // Who waits for room gets it, and then sees the end.
        empty(&self.messages);
    }
}

fn empty<T>(messages: &Receiver<T>) {
    messages.try_iter().for_each(drop);
}

impl<T> fmt::Debug for Address<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address").field("waiting", &self.messages.len()).field("ended", &self.ended).finish()
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("waiting", &self.messages.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn what_waits_when_the_actor_ends_ends_too() {
        let (address, mailbox) = mailbox(4);
        let (reply, answer) = bounded::<()>(1);
        address.send(reply).unwrap();
        assert_eq!(mailbox.len(), 1);
        drop(mailbox);
        answer.recv_timeout(SOON).unwrap_err();
        assert!(answer.is_empty() && answer.try_recv() == Err(crossbeam_channel::TryRecvError::Disconnected));
    }

    #[test]
    fn what_comes_after_the_end_is_refused_and_ends() {
        let (address, mailbox) = mailbox(1);
        drop(mailbox);
        for _ in 0..3 {
            let (reply, answer) = bounded::<()>(1);
            assert_eq!(address.send(reply.clone()), Err(Ended));
            assert_eq!(address.try_send(reply), Err(Refused::Ended));
            assert_eq!(answer.try_recv(), Err(crossbeam_channel::TryRecvError::Disconnected));
        }
    }

    #[test]
    fn a_full_one_refuses_at_once_or_has_its_sender_wait() {
        let (address, mailbox) = mailbox(1);
        address.send(1).unwrap();
        assert_eq!(address.try_send(2), Err(Refused::Full));
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| address.send(3));
            assert_eq!(mailbox.recv(), Ok(1));
            assert_eq!(mailbox.recv(), Ok(3));
            assert_eq!(sender.join().unwrap(), Ok(()));
        });
        drop(address);
        assert!(mailbox.recv().is_err());
    }

    /// Whenever the end comes, between any two instructions of those who send: nobody who sent waits for ever, neither for
    /// room nor for an answer.
    #[test]
    fn nobody_waits_for_an_actor_that_ends() {
        for round in 0..2000u32 {
            let (address, mailbox) = mailbox::<Sender<u32>>(2);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        loop {
                            let (reply, answer) = bounded(1);
                            let sent = address.send(reply);
                            // Both may be: answered as one of the last, and refused.
                            let answered = match answer.recv_timeout(SOON) {
                                Ok(_) => true,
                                Err(crossbeam_channel::RecvTimeoutError::Disconnected) => false,
                                Err(crossbeam_channel::RecvTimeoutError::Timeout) => panic!("no answer, no end"),
                            };
                            if sent.is_err() {
                                return;
                            }
                            if !answered {
                                assert_eq!(address.try_send(bounded(1).0), Err(Refused::Ended));
                                return;
                            }
                        }
                    });
                }
                scope.spawn(move || {
                    for _ in 0..round % 7 {
                        let reply = mailbox.recv().unwrap();
                        // Whoever asked waits.
                        reply.send(round).unwrap();
                    }
                });
            });
        }
    }
}
