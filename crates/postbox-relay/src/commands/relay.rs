//! `postbox relay`: runs until a signal, and says on stderr how it goes.

use crate::cli::RelayArgs;
use crate::config::{Config, DEFAULT_URL};
use crate::failure::Failure;
use crate::run::Runner;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::{database, demo, live};
use postbox_engine::{SourceErrorKind, Stopped};
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

/// From one try to make the tables to the next: as in any outage of the database.
const TRY_EVERY: Duration = Duration::from_secs(5);
/// Reading, sending and settling overlap; the sinks' own threads do the rest.
const WORKERS: usize = 2;

pub(crate) fn run(config: &Config, args: &RelayArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let outcome = runtime.block_on(relay(config, args));
    // What still runs is a send that was given up, or a worker that waits for a database.
    runtime.shutdown_background();
    outcome
}

async fn relay(config: &Config, args: &RelayArgs) -> Result<(), Failure> {
    let screen = Screen::new()?;
    let mut stop = pin!(Signals::new()?.stop());
    let location = database::location(config);
    let shop = match (args.demo, location.sqlite_path()) {
        (true, None) => {
            return Err(Failure::usage(
                "--demo writes orders into SQLite, and the configuration names another database",
            )
            .remedy("unset source.url and DATABASE_URL, or leave --demo out"));
        }
        (demo, path) => path.filter(|_| demo),
    };
    let runner = Runner::new(config)?; // all of the configuration is looked at before anything is made
    if config.source.url.is_none() || args.demo {
        tokio::select! {
            biased; // a stop signal wins over a lock that is waited for
            () = &mut stop => {
                screen.say("stopped while it waited for the database file; nothing was sent");
                return Ok(());
            }
            made = make_tables(config, &screen) => made?,
        }
    }
    let shop = shop.map(|path| demo::open(&path, &config.source.schema)).transpose()?;
    announce(config, &screen, shop.is_some());
    // Events made in memory have no database to ask.
    let telling = tokio::spawn(live::tell(screen.clone(), runner.counters(), database::admin(config).ok()));
    let outcome = runner.run(stop).await;
    telling.abort();
    screen.clear();
    drop(shop);
    match outcome? {
        Stopped::Clean => screen.say("stopped: all in hand is settled, and the lease is handed over"),
        Stopped::LeaseKept => {
            screen.say("stopped: all in hand is settled; the lease could not be handed over, and ends by itself")
        }
        Stopped::Abandoned { in_flight } => screen.say(&format!(
            "stopped at relay.drain_timeout: {in_flight} events had no answer yet, or it could not be recorded; the next relay sends them again"
        )),
    }
    Ok(())
}

/// The embedded default is ready without a command; a database that somebody named is changed by `migrate` only. A lock
/// that another process holds is waited for.
async fn make_tables(config: &Config, screen: &Screen) -> Result<(), Failure> {
    let url = config.source.url();
    let path = url.expose_secret().trim_start_matches("sqlite:").to_owned();
    let is_new = !Path::new(&path).exists();
    let admin = database::admin(config)?;
    while let Err(error) = admin.migrate().await {
        if error.kind != SourceErrorKind::Unavailable {
            return Err(error.into());
        }
        tracing::warn!(%error, "the source is out");
        tokio::time::sleep(TRY_EVERY).await;
    }
    if is_new {
        screen.say(&format!("made {path}, a SQLite database with the outbox"));
    }
    Ok(())
}

fn announce(config: &Config, screen: &Screen, demo: bool) {
    let url = config.source.url();
    for (name, stream) in &config.stream {
        screen.say(&format!("relay: stream {name}, from {url} to {}; Ctrl-C stops it", stream.sink.as_str()));
    }
    if demo {
        screen.say(
            "demo: a small shop writes orders; each business transaction also writes its event, and here they arrive.\n\
             In another terminal, in this folder, try:\n  \
             postbox status\n  \
             postbox publish order 42 order.placed '{\"total\": 10}'\n  \
             postbox trace EVENT_ID",
        );
    } else if url.expose_secret() == DEFAULT_URL {
        screen.say("this is the embedded default, the file postbox.db in this folder; try: postbox relay --demo");
    }
}
