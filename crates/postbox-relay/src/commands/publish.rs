//! `postbox publish`: one event in a transaction of its own, to try things out and for scripts.

use super::{print, print_json};
use crate::cli::PublishArgs;
use crate::config::Config;
use crate::failure::Failure;
use postbox::Event;
use serde_json::json;
use std::io::Read;

pub(crate) async fn run(config: &Config, args: &PublishArgs) -> Result<(), Failure> {
    let event = event(args)?;
    crate::database::admin(config)?.publish(&event).await?;
    let id = event.id();
    let printed = match args.output.json {
        true => print_json(&json!({ "event_id": id.to_string() })),
        false => print(&format!("{id}\n")),
    };
    // A script that takes this for an event that is not there would write it twice.
    printed.map_err(|failure| {
        Failure::failed(format!("the event {id} is written and will be published; only {}", failure.what))
            .remedy("do not publish it again; its id is in the line above")
    })
}

fn event(args: &PublishArgs) -> Result<Event, Failure> {
    let payload = match args.payload.as_str() {
        "-" => {
            let mut text = String::new();
            let read = std::io::stdin().read_to_string(&mut text);
            read.map_err(|error| Failure::failed(format!("the payload cannot be read from stdin: {error}")))?;
            text
        }
        text => text.to_owned(),
    };
    let event = Event::new(&args.aggregate_type, &args.aggregate_id, &args.event_type).json_text(payload);
    let event = args.headers.iter().fold(event, |event, (name, value)| event.header(name, value));
    let event = args.event_id.map_or(event.clone(), |id| event.with_id(id));
    Ok(args.destination.iter().fold(event, |event, destination| event.destination(destination)))
}
