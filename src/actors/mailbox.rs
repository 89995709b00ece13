//! The inbox of an actor: a bounded channel whose messages are dropped when the actor ends. Not here: threads, and the
//! types of the messages.
//!
//! A plain bounded crossbeam channel keeps messages that nobody will receive for as long as a sender exists. Such a
//! message also keeps its reply channel open, so a caller that waits for the reply would wait forever.

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The sending end. The actor's [`Mailbox`] closes when the last address is dropped.
pub struct Address<T> {
    sender: Sender<T>,
    /// Used to drop messages that arrive after the actor has ended.
    messages: Receiver<T>,
    ended: Arc<AtomicBool>,
}

/// The receiving end, which derefs to a [`Receiver`]. When it is dropped, also by a panic, all messages in the channel
/// and all later ones are dropped.
pub struct Mailbox<T> {
    messages: Receiver<T>,
    ended: Arc<AtomicBool>,
}

/// Error: the actor has ended. The message was dropped, unless the actor received it just before it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActorEnded;

/// Why [`Address::try_send`] did not send a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The channel is full.
    Full,
    /// The actor has ended; see [`ActorEnded`].
    Ended,
}

/// Creates both ends of an inbox with room for `capacity` messages.
pub fn mailbox<T>(capacity: usize) -> (Address<T>, Mailbox<T>) {
    let (sender, messages) = bounded(capacity);
    let ended = Arc::new(AtomicBool::new(false));
    let address = Address { sender, messages: messages.clone(), ended: Arc::clone(&ended) };
    (address, Mailbox { messages, ended })
}

impl<T> Address<T> {
    /// Sends a message; blocks while the channel is full.
    pub fn send(&self, message: T) -> Result<(), ActorEnded> {
        // Never fails, because this address holds a receiver itself.
        self.sender.send(message).map_err(|_| ActorEnded)?;
        self.arrived()
    }

    /// Sends a message or returns at once.
    pub fn try_send(&self, message: T) -> Result<(), Refused> {
        match self.sender.try_send(message) {
            Ok(()) => self.arrived().map_err(|ActorEnded| Refused::Ended),
            Err(TrySendError::Full(_)) if self.ended.load(Ordering::SeqCst) => Err(Refused::Ended),
            Err(TrySendError::Full(_)) => Err(Refused::Full),
            Err(TrySendError::Disconnected(_)) => Err(Refused::Ended),
        }
    }

    /// Called after a message was put into the channel. The mailbox sets `ended` before it empties the channel. So
    /// either it drops this message, or the check here sees `ended` and drops it.
    fn arrived(&self) -> Result<(), ActorEnded> {
        if self.ended.load(Ordering::SeqCst) {
            empty(&self.messages);
            return Err(ActorEnded);
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
        // This wakes senders that are blocked on a full channel; they then see `ended`.
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
            assert_eq!(address.send(reply.clone()), Err(ActorEnded));
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

    /// Goal: no sender waits forever, neither for room nor for a reply, whenever the actor ends. Method: three senders
    /// and an actor that ends after 0 to 6 messages, 2000 times.
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
                            // A message can be answered just before the end although its sender gets `ActorEnded`.
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
                        // The sender waits for this reply.
                        reply.send(round).unwrap();
                    }
                });
            });
        }
    }
}
