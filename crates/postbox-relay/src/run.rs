//! From a configuration to running relays: one per stream, each a source and a sink joined by the engine. The same
//! for the program and for a service that has the relay inside.

use crate::config::{self, Config, RelaySection, StreamSection};
use crate::database;
use crate::failure::{Failure, with_causes};
use postbox_engine::{ClaimLimit, Counters, Relay, RelayOptions, Route, Stopped};
use postbox_sinks::AnySink;
use postbox_sources::{AnySource, SourceConfig};
use std::future::Future;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Runs the relay of every configured stream until `stop` resolves, then drains within `relay.drain_timeout` and
/// hands over. Outages of database and broker are waited out, and logged through `tracing`. A process that talks
/// TLS installs rustls's provider first.
///
/// # Errors
/// What an operator must mend: a wrong configuration, missing tables or rights, an untrusted cursor.
pub async fn run(config: &Config, stop: impl Future<Output = ()> + Send) -> Result<Stopped, Failure> {
    Runner::new(config)?.run(stop).await
}

/// Makes the tables of the configured database, or brings them up to date; safe to repeat, and when several start at
/// once. As `postbox migrate`.
///
/// # Errors
/// The database cannot be reached, lacks rights, or has tables of a newer version.
pub async fn migrate(config: &Config) -> Result<(), Failure> {
    database::admin(config)?.migrate().await?;
    Ok(())
}

/// The relays of a configuration, built and not started.
pub struct Runner {
    relays: Vec<(Arc<str>, Relay<AnySource, AnySink>)>,
}

impl Runner {
    /// # Errors
    /// What the configuration names and this build or the sink cannot do.
    pub fn new(config: &Config) -> Result<Runner, Failure> {
        config::check(config)?; // a service may have made it without `load`
        let relays = config.stream.iter().map(|(name, stream)| relay(config, name, stream));
        Ok(Runner { relays: relays.collect::<Result<_, Failure>>()? })
    }

    /// The counters of each stream; they live on while the relays run.
    pub fn counters(&self) -> Vec<(Arc<str>, Arc<Counters>)> {
        self.relays.iter().map(|(name, relay)| (name.clone(), relay.counters())).collect()
    }

    /// See [`run`].
    ///
    /// # Errors
    /// The first relay's that ends with one; the others are stopped cleanly.
    pub async fn run(self, stop: impl Future<Output = ()> + Send) -> Result<Stopped, Failure> {
        let (stopping, stopped) = watch::channel(false);
        let mut running = JoinSet::new();
        for (_, relay) in self.relays {
            let mut stopped = stopped.clone();
            running.spawn(relay.run(async move {
                // An error means that the sender is gone, and with it whoever could want us to go on.
                let _ = stopped.wait_for(|stop| *stop).await;
            }));
        }
        let mut stop = std::pin::pin!(stop);
        let mut outcome = Ok(Stopped::Clean);
        loop {
            let ended = tokio::select! {
                biased; // the stop signal first: all relays are to hear it, however busy
                () = &mut stop, if !*stopping.borrow() => {
                    stopping.send_replace(true);
                    continue;
                }
                ended = running.join_next() => ended,
            };
            match ended {
                None => return outcome,
                Some(Ok(Ok(stopped))) => outcome = outcome.map(|before| worse(before, stopped)),
                Some(Ok(Err(error))) => {
                    outcome = outcome.and(Err(error.into()));
                    stopping.send_replace(true);
                }
                Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
            }
        }
    }
}

/// How two relays ended, as one.
fn worse(one: Stopped, other: Stopped) -> Stopped {
    match (one, other) {
        (Stopped::Abandoned { in_flight: n }, Stopped::Abandoned { in_flight: m }) => {
            Stopped::Abandoned { in_flight: n + m }
        }
        (abandoned @ Stopped::Abandoned { .. }, _) | (_, abandoned @ Stopped::Abandoned { .. }) => abandoned,
        (Stopped::LeaseKept, _) | (_, Stopped::LeaseKept) => Stopped::LeaseKept,
        (Stopped::Clean, Stopped::Clean) => Stopped::Clean,
    }
}

fn relay(
    config: &Config,
    name: &str,
    stream: &StreamSection,
) -> Result<(Arc<str>, Relay<AnySource, AnySink>), Failure> {
    let (sink, route) = destination(name, stream)?;
    let RelaySection { events_max, bytes_max, send_timeout, drain_timeout, .. } = config.relay;
    let options = RelayOptions {
        stream: name.into(),
        events_max,
        bytes_max,
        retry: (&stream.retry).into(),
        send_timeout,
        drain_timeout,
        seed: uuid::Uuid::now_v7().as_u64_pair().1, // relays that fail together must not retry together
    };
    let source = source_config(config, name, stream, options.hand());
    let source = postbox_sources::build(&source).map_err(database::named_wrongly)?;
    Ok((name.into(), Relay::new(Arc::new(source), Arc::new(sink), route, options)))
}

/// Where a stream's events go: all of it that can be known to be wrong without connecting.
pub(crate) fn destination(name: &str, stream: &StreamSection) -> Result<(AnySink, Route), Failure> {
    let wrong = |what: String| Failure::usage(format!("stream.{name}{what}"));
    let route = Route::new(stream.routes.clone()).map_err(|error| wrong(format!(".routes: {error}")))?;
    let sink = postbox_sinks::build(&stream.sink_config(name)?);
    let sink = sink.map_err(|error| wrong(format!(": {}", with_causes(&error))))?;
    let unusable = route.fixed_topics().find_map(|topic| sink.unusable(topic));
    let unusable = unusable.or_else(|| route.topic_texts().find_map(|text| sink.unusable_part(&text)));
    match unusable {
        None => Ok((sink, route)),
        Some(why) => Err(wrong(format!(".routes: {why}"))),
    }
}

fn source_config(config: &Config, name: &str, stream: &StreamSection, hand: ClaimLimit) -> SourceConfig {
    SourceConfig {
        location: database::location(config),
        stream: name.to_owned(),
        relay: config.relay.name.clone().unwrap_or_else(default_name),
        lease: config.relay.lease,
        retention: config.source.retention,
        policy: stream.dead.into(),
        hand,
    }
}

fn default_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok().or_else(|| std::env::var("HOSTNAME").ok());
    let host = host.as_deref().map(str::trim).filter(|host| !host.is_empty()).unwrap_or("relay");
    format!("{host}-{}", std::process::id())
}
