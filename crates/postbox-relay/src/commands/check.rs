//! `postbox check`: connects to everything that the relay needs and says what is missing and what mends it.

use super::{print, print_json};
use crate::cli::OutputArgs;
use crate::config::{Config, SinkName};
use crate::failure::Failure;
use crate::run::{route, sink};
use postbox_engine::Sink;
use postbox_sources::admin::Finding;
use serde_json::json;

pub(crate) async fn run(config: &Config, output: OutputArgs) -> Result<(), Failure> {
    let mut findings = check_source(config).await;
    for (name, stream) in &config.stream {
        findings.extend(check_sink(name, stream).await);
    }
    if output.json {
        print_json(&json!(findings))?;
    } else {
        print(&findings.iter().map(line).collect::<String>())?;
    }
    match findings.iter().filter(|finding| !finding.ok).count() {
        0 => Ok(()),
        1 => Err(Failure::unwell("check: one thing must be mended")),
        n => Err(Failure::unwell(format!("check: {n} things must be mended"))),
    }
}

async fn check_source(config: &Config) -> Vec<Finding> {
    match crate::database::admin(config) {
        Ok(admin) => admin.check().await,
        Err(failure) => vec![bad(failure.what, failure.remedy)],
    }
}

async fn check_sink(name: &str, stream: &crate::config::StreamSection) -> Vec<Finding> {
    let what = format!("stream {name}: sink {}", stream.sink.as_str());
    let (route, sink) = match (route(name, stream), sink(name, stream)) {
        (Ok(route), Ok(sink)) => (route, sink),
        (Err(failure), _) | (_, Err(failure)) => return vec![bad(failure.what, failure.remedy)],
    };
    if let Err(error) = sink.check().await {
        return vec![bad(format!("{what}: {error}"), None)];
    }
    let mut findings = vec![Finding { ok: true, what: format!("{what}: connected"), remedy: None }];
    match sink.check_destinations(&route.fixed_topics().collect::<Vec<_>>()).await {
        Ok(wrong) => findings.extend(wrong.into_iter().map(|wrong| bad(format!("{what}: {wrong}"), None))),
        Err(error) => findings.push(bad(format!("{what}: {error}"), None)),
    }
    if stream.sink == SinkName::Kafka && route.has_templates() {
        let what = format!("{what}: topics with {{..}} depend on the event, and are looked up when one comes");
        findings.push(Finding { ok: true, what, remedy: None });
    }
    findings
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
