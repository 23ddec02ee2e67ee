//! `postbox check`: connects to everything that the relay needs and says what is missing and what mends it.

use super::{print, print_json};
use crate::cli::OutputArgs;
use crate::config::{Config, SinkName, StreamSection};
use crate::failure::{Code, Failure};
use crate::run::destination;
use crate::screen::log_filter;
use postbox_engine::Sink;
use postbox_sources::admin::Finding;
use serde_json::json;

pub(crate) async fn run(config: &Config, output: OutputArgs) -> Result<(), Failure> {
    let mut findings = Vec::new();
    let mut misconfigured = false;
    let mut add = |found: Result<Vec<Finding>, Failure>| match found {
        Ok(found) => findings.extend(found),
        Err(Failure { code, what, remedy }) => {
            misconfigured |= code == Code::Usage;
            findings.push(bad(what, remedy));
        }
    };
    add(log_filter().map(|_| Vec::new())); // the relay would not start with a wrong one
    add(check_source(config).await);
    for (name, stream) in &config.stream {
        add(check_sink(name, stream).await);
    }
    if output.json {
        print_json(&json!(findings))?;
    } else {
        print(&findings.iter().map(line).collect::<String>())?;
    }
    let what = match findings.iter().filter(|finding| !finding.ok).count() {
        0 => return Ok(()),
        1 => "check: one thing must be mended".to_owned(),
        n => format!("check: {n} things must be mended"),
    };
    Err(if misconfigured { Failure::usage(what) } else { Failure::unwell(what) })
}

async fn check_source(config: &Config) -> Result<Vec<Finding>, Failure> {
    Ok(crate::database::admin(config)?.check().await)
}

async fn check_sink(name: &str, stream: &StreamSection) -> Result<Vec<Finding>, Failure> {
    let what = format!("stream {name}: sink {}", stream.sink.as_str());
    let (sink, route) = destination(name, stream)?;
    let warning = |warning| Finding { ok: true, what: format!("{what}: warning: {warning}"), remedy: None };
    let mut findings = Vec::from_iter(sink.warning().map(warning));
    if let Err(error) = sink.check().await {
        findings.push(bad(format!("{what}: {error}"), None));
        return Ok(findings);
    }
    if stream.sink != SinkName::Webhook || sink.warning().is_none() {
        // A webhook without an address has nothing to connect to.
        findings.push(Finding { ok: true, what: format!("{what}: connected"), remedy: None });
    }
    match sink.check_destinations(&route.fixed_topics().collect::<Vec<_>>()).await {
        Ok(wrong) => findings.extend(wrong.into_iter().map(|wrong| bad(format!("{what}: {wrong}"), None))),
        Err(error) => findings.push(bad(format!("{what}: {error}"), None)),
    }
    if stream.sink == SinkName::Kafka && route.has_templates() {
        let what = format!("{what}: topics with {{..}} depend on the event, and are looked up when one comes");
        findings.push(Finding { ok: true, what, remedy: None });
    }
    Ok(findings)
}

fn bad(what: String, remedy: Option<String>) -> Finding {
    Finding { ok: false, what, remedy }
}

fn line(finding: &Finding) -> String {
    let mark = if finding.ok { "ok  " } else { "MEND" };
    match &finding.remedy {
        Some(remedy) => format!("{mark}  {}\n      mend: {remedy}\n", finding.what),
        None => format!("{mark}  {}\n", finding.what),
    }
}
