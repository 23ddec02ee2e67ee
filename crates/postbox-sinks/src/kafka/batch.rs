//! Batches in flight, and who is waiting for them. A delivery report costs one atomic subtraction; only failures
//! are written down. It knows nothing of Kafka.

use postbox_engine::SendError;
use std::sync::atomic::{AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, Semaphore};

/// More batches than any relay has in flight, those included that it gave up and whose reports are still out.
const SLOTS: usize = 64;

pub(super) struct Batches {
    slots: Vec<Slot>,
    free: Mutex<Vec<usize>>,
    /// As many permits as `free` has entries.
    room: Semaphore,
}

#[derive(Default)]
struct Slot {
    /// Reports that are still out, plus one as long as somebody waits for them. Zero: the slot is free.
    open: AtomicU32,
    failed: Mutex<Vec<(u32, SendError)>>,
    done: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Batches {
    pub(super) fn new() -> Arc<Batches> {
        Arc::new(Batches {
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            free: Mutex::new((0..SLOTS).collect()),
            room: Semaphore::new(SLOTS),
        })
    }

    /// A place for a batch of so many messages; waits while there is none.
    pub(super) async fn open(self: Arc<Batches>, messages: usize) -> Ticket {
        let messages = u32::try_from(messages).expect("a batch has fewer than 4 billion messages");
        self.room.acquire().await.expect("never closed").forget();
        let slot = lock(&self.free).pop().expect("a permit stands for a free slot");
        self.slots[slot].open.store(messages + 1, Release);
        Ticket { batches: self, slot, messages, not_handed_over: messages }
    }

    /// Messages whose reports are still out, of all batches; one too many for each batch that is waited for.
    pub(super) fn open_messages(&self) -> usize {
        self.slots.iter().map(|slot| slot.open.load(Relaxed) as usize).sum()
    }

    /// The report about one message.
    pub(super) fn report(&self, opaque: usize, outcome: Result<(), SendError>) {
        let (slot, message) = (opaque >> 32, opaque as u32);
        if let Err(error) = outcome {
            lock(&self.slots[slot].failed).push((message, error));
        }
        self.close(slot, 1);
    }

    fn close(&self, slot: usize, count: u32) {
        match self.slots[slot].open.fetch_sub(count, AcqRel) - count {
            // Also when the waiter closes its own last message: it keeps the permit and looks again.
            1 => self.slots[slot].done.notify_one(),
            0 => {
                lock(&self.slots[slot].failed).clear();
                lock(&self.free).push(slot);
                self.room.add_permits(1);
            }
            _ => {}
        }
    }
}

/// A batch's place. Dropping it gives the batch up; the place is free again when all its reports are in.
pub(super) struct Ticket {
    batches: Arc<Batches>,
    slot: usize,
    messages: u32,
    not_handed_over: u32,
}

impl Ticket {
    /// What a message carries, so that its report finds its way back.
    pub(super) fn opaque(&self, message: usize) -> usize {
        self.slot << 32 | message
    }
    /// A report will come for this message.
    pub(super) fn handed_over(&mut self) {
        self.not_handed_over -= 1;
    }
    /// No report will come for this message.
    pub(super) fn fail(&mut self, message: usize, error: SendError) {
        self.handed_over();
        self.batches.report(self.opaque(message), Err(error));
    }
    /// Waits for the reports. Safe to drop and to call again.
    pub(super) async fn reports(&self) {
        let slot = &self.batches.slots[self.slot];
        while slot.open.load(Acquire) > 1 {
            slot.done.notified().await; // a permit left over from an earlier batch only costs a look
        }
    }
    /// What became of the messages, once all reports are in.
    pub(super) fn outcomes(self) -> Vec<Result<(), SendError>> {
        let mut outcomes: Vec<_> = (0..self.messages).map(|_| Ok(())).collect();
        for (message, error) in lock(&self.batches.slots[self.slot].failed).drain(..) {
            outcomes[message as usize] = Err(error);
        }
        outcomes
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.batches.close(self.slot, self.not_handed_over + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postbox_engine::SendErrorKind;

    fn error(text: &str) -> SendError {
        SendError::new(SendErrorKind::Failed, text)
    }

    #[tokio::test]
    async fn each_message_gets_its_own_outcome_and_the_place_is_free_again() {
        let batches = Batches::new();
        for _ in 0..3 * SLOTS {
            let mut ticket = batches.clone().open(3).await;
            ticket.handed_over();
            ticket.fail(1, error("local"));
            ticket.handed_over();
            let (reports, opaques) = (batches.clone(), [ticket.opaque(2), ticket.opaque(0)]);
            let reporter = std::thread::spawn(move || {
                reports.report(opaques[0], Err(error("reported")));
                reports.report(opaques[1], Ok(()));
            });
            ticket.reports().await;
            assert_eq!(ticket.outcomes(), [Ok(()), Err(error("local")), Err(error("reported"))]);
            reporter.join().unwrap();
        }
        assert_eq!(lock(&batches.free).len(), SLOTS);
    }

    #[tokio::test]
    async fn a_batch_given_up_keeps_its_place_until_its_reports_are_in() {
        let batches = Batches::new();
        let mut ticket = batches.clone().open(3).await;
        ticket.handed_over();
        let opaque = ticket.opaque(0);
        drop(ticket);
        assert_eq!(lock(&batches.free).len(), SLOTS - 1);
        batches.report(opaque, Err(error("late")));
        assert_eq!(lock(&batches.free).len(), SLOTS);
        let ticket = batches.clone().open(0).await;
        ticket.reports().await;
        assert_eq!(ticket.outcomes(), []);
        assert_eq!(lock(&batches.free).len(), SLOTS);
    }
}
