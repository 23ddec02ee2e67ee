//! A real Kafka broker (KRaft, one node) on free ports of 127.0.0.1, with a folder of its own.
//! Topics are not made by themselves: a test makes the topic it wants, and a missing one is missing.

use super::supervisor::{Plan, Supervisor};
use super::wire::KafkaWire;
use super::{TcpProxy, cache, free_ports};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const POM: &str = include_str!("../../resources/kafka.pom.xml");
const NODE: &str = include_str!("../../resources/node.sh");
const SASL: &str = include_str!("../../resources/sasl.sh");

/// How a broker runs.
#[derive(Clone, Debug, Default)]
pub struct KafkaOptions {
    /// SASL_SSL with an own CA, SASL_PLAINTEXT and SSL beside it, and ACLs; see `resources/sasl.sh` for users and
    /// certificates.
    pub sasl: bool,
    /// The full JIT and 1 GB, as a benchmark needs; the default is quick to start and small.
    pub bench_jit: bool,
    /// A [`TcpProxy`] between the clients and the broker; not together with SASL.
    pub proxied: bool,
    /// Broker properties that override.
    pub extra: Vec<(String, String)>,
}

/// A running broker. Dropping it kills it and removes its folder.
pub struct Kafka {
    server: Supervisor,
    port: u16,
    /// SASL_PLAINTEXT and SSL, of a broker with SASL.
    more_ports: Option<[u16; 2]>,
    proxy: Option<TcpProxy>,
}

impl Kafka {
    /// A broker of one's own, without TLS and SASL.
    ///
    /// # Errors
    /// A program is missing (and the command that installs it), or the broker's own message.
    pub fn start() -> Result<Kafka> {
        Kafka::start_with(&KafkaOptions::default())
    }

    /// See [`Kafka::start`].
    pub fn start_with(options: &KafkaOptions) -> Result<Kafka> {
        // A free port may be taken by somebody else before the broker has it.
        Kafka::try_start(options).or_else(|first| match format!("{first:#}") {
            text if text.contains("Address already in use") => Kafka::try_start(options),
            _ => Err(first),
        })
    }

    fn try_start(options: &KafkaOptions) -> Result<Kafka> {
        let jars = jars()?;
        let folder = cache::server_folder()?;
        let ports @ [port, sasl_plaintext, ssl, _] = free_ports()?;
        let plan = Plan {
            name: "Kafka".into(),
            command: vec!["sh".into(), script(&folder, if options.sasl { "sasl.sh" } else { "node.sh" }), "1".into()],
            env: environment(&folder, &jars, ports, options),
            folder,
        };
        let proxy = options.proxied.then(|| TcpProxy::start(port)).transpose()?;
        let server = Supervisor::new(plan)?;
        fs::write(server.folder().join("node.sh"), NODE)?;
        fs::write(server.folder().join("sasl.sh"), SASL)?;
        fs::write(server.folder().join("extra"), properties(options, proxy.as_ref()))?;
        let more_ports = options.sasl.then_some([sasl_plaintext, ssl]);
        let mut kafka = Kafka { server, port, more_ports, proxy };
        kafka.launch()?;
        Ok(kafka)
    }

    fn launch(&mut self) -> Result<()> {
        let (port, login) = self.way_in();
        self.server
            .start(|| KafkaWire::connect(port, login).and_then(|mut w| w.brokers()).is_ok_and(|all| all.len() == 1))
    }

    /// The one broker that all tests of this process share; make a topic for each test.
    ///
    /// # Panics
    /// When it does not start.
    pub fn shared() -> &'static Kafka {
        static SHARED: OnceLock<Kafka> = OnceLock::new();
        SHARED.get_or_init(|| Kafka::start().expect("Kafka starts"))
    }

    /// For clients: PLAINTEXT, or SASL_SSL when it was asked for.
    pub fn bootstrap(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }
    /// The port of `bootstrap`.
    pub fn port(&self) -> u16 {
        self.proxy.as_ref().map_or(self.port, TcpProxy::port)
    }
    /// What is between the clients and the broker, where it was asked for.
    pub fn proxy(&self) -> Option<&TcpProxy> {
        self.proxy.as_ref()
    }
    /// SASL_PLAINTEXT, of a broker with SASL.
    pub fn sasl_plaintext_bootstrap(&self) -> Option<String> {
        self.more_ports.map(|[port, _]| format!("127.0.0.1:{port}"))
    }
    /// SSL, of a broker with SASL.
    pub fn ssl_bootstrap(&self) -> Option<String> {
        self.more_ports.map(|[_, port]| format!("127.0.0.1:{port}"))
    }
    /// A file that `resources/sasl.sh` made: `ca.pem` signed the broker's certificate (for localhost and 127.0.0.1), and a
    /// client's (`relay.pem`, `relay.key`).
    pub fn certificate(&self, name: &str) -> PathBuf {
        self.server.folder().join("node").join(name)
    }
    /// The broker's process.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Its data and its log; gone when the server is.
    pub fn folder(&self) -> &Path {
        self.server.folder()
    }

    /// Where the broker tells its clients to go: "host:port".
    ///
    /// # Errors
    /// The broker does not answer.
    pub fn advertised(&self) -> Result<Vec<String>> {
        let (port, login) = self.way_in();
        KafkaWire::connect(port, login)?.brokers()
    }

    /// Makes a topic, with settings such as `("max.message.bytes", "2000")`. Not on a broker with SASL, where only
    /// the administrator may.
    ///
    /// # Errors
    /// The broker's code: 36 when the topic is there, 17 when the name is not valid.
    pub fn create_topic(&self, name: &str, partitions: u32, settings: &[(&str, &str)]) -> Result<()> {
        let (port, login) = self.way_in();
        KafkaWire::connect(port, login)?.create_topic(name, partitions, settings)
    }

    /// A clean stop; the folder is removed.
    ///
    /// # Errors
    /// The broker did not end cleanly.
    pub fn stop(mut self) -> Result<()> {
        let code = self.server.end("TERM")?;
        ensure!(code == 143, "Kafka ended with code {code}:\n{}", self.server.log_tail()); // the JVM's way on SIGTERM
        self.server.finish()
    }

    /// SIGKILL; `restart` brings it back.
    pub fn crash(&mut self) -> Result<()> {
        self.server.kill()
    }

    /// Starts it again on the same port and data; if it still runs, after a clean stop.
    pub fn restart(&mut self) -> Result<()> {
        if self.server.running() {
            self.server.end("TERM").context("cannot stop Kafka")?;
        }
        self.launch()
    }

    fn way_in(&self) -> (u16, Option<(&'static str, &'static str)>) {
        match self.more_ports {
            Some([port, _]) => (port, Some(("app", "app-secret-plain"))),
            None => (self.port, None),
        }
    }
}

/// The folder of the jars, fetched if need be.
pub(super) fn jars() -> Result<PathBuf> {
    cache::once("kafka-4.4.0", |folder| cache::maven(POM, "copy-dependencies", folder))
}

fn script(folder: &Path, name: &str) -> String {
    folder.join(name).display().to_string()
}

fn environment(folder: &Path, jars: &Path, ports: [u16; 4], options: &KafkaOptions) -> Vec<(&'static str, String)> {
    let [port, sasl_plaintext, ssl, controller] = ports;
    let mut env = vec![
        ("LIB", jars.display().to_string()),
        ("DIR", folder.join("node").display().to_string()),
        ("PORT", port.to_string()),
        ("PORT2", sasl_plaintext.to_string()),
        ("PORT3", ssl.to_string()),
        ("VOTERS", format!("1@127.0.0.1:{controller}")),
        ("EXTRA", folder.join("extra").display().to_string()),
    ];
    if options.bench_jit {
        env.push(("JVM", "-Xms1g -Xmx1g".into()));
    }
    env
}

fn properties(options: &KafkaOptions, proxy: Option<&TcpProxy>) -> String {
    let mut lines = String::from("auto.create.topics.enable=false\n");
    if let Some(proxy) = proxy {
        // Clients go where the broker says it is.
        lines.push_str(&format!("advertised.listeners=PLAINTEXT://127.0.0.1:{}\n", proxy.port()));
    }
    for (name, value) in &options.extra {
        lines.push_str(&format!("{name}={value}\n"));
    }
    lines
}
