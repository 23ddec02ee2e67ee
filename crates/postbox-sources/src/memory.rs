//! Events from nowhere: as many as asked for, made up in memory. It shows what engine and sink take on their own,
//! with no database in the way; nothing is recorded, and a restart begins anew.

use postbox_engine::{
    Changes, ClaimLimit, EventParts, HeldPage, HeldQuery, Loaded, Log, LogPage, PageBuilder, SourceError,
};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// `events` events of 500 bytes over 10,000 aggregates, then silence.
pub struct MemoryLog {
    events: u64,
    made: AtomicU64,
}

/// As the log sources on databases.
const PAGE: u64 = 2_000;
const AGGREGATES: u64 = 10_000;
const PAYLOAD: usize = 500;
/// Nobody else can have it.
const LEASE: Duration = Duration::from_secs(3600);

impl MemoryLog {
    /// So many events.
    pub fn new(events: u64) -> MemoryLog {
        MemoryLog { events, made: AtomicU64::new(0) }
    }

    fn page(&self, from: u64, to: u64) -> LogPage<u64> {
        let (mut page, mut payload) = (PageBuilder::default(), Vec::with_capacity(PAYLOAD));
        for n in from..to {
            let (aggregate, seq) = (n % AGGREGATES, n / AGGREGATES + 1);
            let id = format!("a{aggregate}");
            payload.clear();
            payload.extend_from_slice(format!("{{\"agg\":\"{id}\",\"seq\":{seq},\"pad\":\"").as_bytes());
            payload.resize(PAYLOAD - 2, b'x');
            payload.extend_from_slice(b"\"}");
            let mut event_id = [0; 16];
            event_id[8..].copy_from_slice(&n.to_be_bytes());
            page.push(&EventParts {
                id: i64::try_from(n).unwrap_or(i64::MAX),
                event_id,
                aggregate_type: "bench",
                aggregate_id: &id,
                aggregate_seq: i64::try_from(seq).ok(),
                event_type: "bench.made",
                schema_version: 1,
                payload: Some(&payload),
                content_type: "application/json",
                headers: "{\"tenant_id\": \"t1\"}",
                ..EventParts::default()
            });
        }
        LogPage { events: page.finish(), delays: Vec::new(), mark: to }
    }
}

impl Log for MemoryLog {
    type Mark = u64;

    async fn acquire(&self) -> Result<Result<Duration, Duration>, SourceError> {
        self.made.store(0, Relaxed);
        Ok(Ok(LEASE))
    }
    async fn renew(&self) -> Result<Duration, SourceError> {
        Ok(LEASE)
    }
    async fn release(&self) -> Result<(), SourceError> {
        Ok(())
    }
    async fn load(&self) -> Result<Loaded, SourceError> {
        Ok(Loaded::default())
    }
    async fn read(&self, _: ClaimLimit) -> Result<LogPage<u64>, SourceError> {
        let from = self.made.load(Relaxed);
        let to = (from + PAGE).min(self.events);
        if from == to {
            std::future::pending::<()>().await;
        }
        self.made.store(to, Relaxed);
        Ok(self.page(from, to))
    }
    async fn held(&self, _: &HeldQuery) -> Result<HeldPage, SourceError> {
        Ok(HeldPage::default())
    }
    async fn record(&self, _: &Changes<u64>) -> Result<(), SourceError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postbox_engine::{DeadPolicy, LogSource, Source};

    #[tokio::test]
    async fn memory_makes_all_events_once_in_order_and_of_one_size() {
        let source = LogSource::new(MemoryLog::new(5_000), DeadPolicy::Skip);
        source.acquire().await.unwrap();
        let mut ids = Vec::new();
        while ids.len() < 5_000 {
            let claim = source.claim(ClaimLimit { events_max: 5_000, bytes_max: usize::MAX }).await.unwrap();
            assert!(claim.events.iter().all(|c| c.event.payload().unwrap().len() == PAYLOAD));
            ids.extend(claim.events.iter().map(|c| c.event.id()));
        }
        assert_eq!(ids, (0..5_000).collect::<Vec<_>>());
    }
}
