//! `postbox trace`: "did we publish event X, and when?"

use super::{print, print_json, table};
use crate::cli::TraceArgs;
use crate::config::Config;
use crate::failure::Failure;
use serde_json::json;

pub(crate) async fn run(config: &Config, args: &TraceArgs) -> Result<(), Failure> {
    let traces = crate::database::admin(config)?.trace(&args.event_id.to_string()).await?;
    if args.output.json {
        print_json(&json!(traces))?;
    }
    if traces.is_empty() {
        return Err(Failure::unwell(format!("no event {} is in the outbox", args.event_id))
            .remedy("it was never committed, or it was published longer ago than events are kept"));
    }
    if args.output.json {
        return Ok(());
    }
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let rows: Vec<Vec<String>> = traces
        .iter()
        .map(|t| {
            let (stream, attempts) = (t.stream.clone(), t.attempts.to_string());
            let (sent, published, relay) = (or_dash(&t.sent_at), or_dash(&t.published_at), or_dash(&t.relay));
            vec![stream, t.state.clone(), t.written_at.clone(), sent, published, relay, attempts, or_dash(&t.error)]
        })
        .collect();
    print(&table(&["STREAM", "STATE", "WRITTEN", "SENT", "PUBLISHED", "RELAY", "ATTEMPTS", "ERROR"], &rows))
}
