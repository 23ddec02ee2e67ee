//! PostgreSQL and Kafka to try things by hand: `cargo run -p postbox-testkit`. They stop at the end of stdin (Ctrl-D),
//! and whenever this process ends.

use anyhow::Result;
use postbox_testkit::services::{Kafka, PgVersion, Postgres};

fn main() -> Result<()> {
    let postgres = Postgres::start(PgVersion::V15)?;
    println!("postgres {} pid {} folder {}", postgres.admin_url(), postgres.pid(), postgres.folder().display());
    let kafka = Kafka::start()?;
    println!("kafka {} pid {} folder {}", kafka.bootstrap(), kafka.pid(), kafka.folder().display());
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    kafka.stop()?;
    postgres.stop()
}
