use crate::{DEADLINE, kinds, message, parts, routed, within};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, Mac};
use postbox_engine::{Envelope, EventParts, SendError, SendErrorKind, Sink};
use postbox_sinks::webhook::{WebhookConfig, WebhookSink};
use postbox_testkit::services::free_port;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const KEY: [u8; 24] = *b"twenty-four bytes of key";

/// What the receiver does with a request once it has read it.
#[derive(Clone, Copy)]
pub(crate) enum Reply {
    Say(&'static str),
    /// Not a word, until the sender goes.
    Silence,
    Hangup,
    /// A body without an end.
    Flood,
}

pub(crate) const OK: Reply = Reply::Say("HTTP/1.1 204 No Content\r\n\r\n");

/// Names in lower case.
type Pairs = Vec<(String, Vec<u8>)>;

struct Request {
    line: String,
    headers: Pairs,
    body: Vec<u8>,
}

impl Request {
    fn header(&self, name: &str) -> &str {
        let (_, value) = self.headers.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no header {name}"));
        std::str::from_utf8(value).unwrap()
    }
}

/// A receiver on a free port: one thread a connection, one reply a request, the last one for ever.
pub(crate) struct Receiver {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    requests: Mutex<Vec<Request>>,
    replies: Vec<Reply>,
    wrap: Box<Wrap>,
    down: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

type Wrap = dyn Fn(TcpStream) -> Option<Box<dyn Stream>> + Send + Sync;

impl Receiver {
    pub(crate) fn start(replies: &[Reply]) -> Receiver {
        Receiver::start_with(replies, |stream| Some(Box::new(stream)))
    }

    fn start_with(
        replies: &[Reply],
        wrap: impl Fn(TcpStream) -> Option<Box<dyn Stream>> + Send + Sync + 'static,
    ) -> Receiver {
        let (requests, down, open) = Default::default();
        let shared = Arc::new(Shared { requests, replies: replies.to_vec(), wrap: Box::new(wrap), down, open });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let receiver = Receiver { port: listener.local_addr().unwrap().port(), shared };
        receiver.listen(listener);
        receiver
    }

    fn listen(&self, listener: TcpListener) {
        let shared = self.shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.down.load(SeqCst) {
                    return;
                }
                let (stream, shared) = (stream.unwrap(), shared.clone());
                let end = stream.try_clone().unwrap();
                shared.open.lock().unwrap().push(stream.try_clone().unwrap());
                std::thread::spawn(move || {
                    if let Some(mut stream) = (shared.wrap)(stream) {
                        let _ = serve(&mut *stream, &shared.requests, &shared.replies); // the sender may go at any moment
                    }
                    let _ = end.shutdown(std::net::Shutdown::Both);
                });
            }
        });
    }

    /// Refuses connections and cuts those that are open.
    pub(crate) fn down(&self) {
        self.shared.down.store(true, SeqCst);
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok() {} // wakes the listener, which then ends
        for stream in self.shared.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both); // it may be gone already
        }
    }
    pub(crate) fn up(&self) {
        self.shared.down.store(false, SeqCst);
        self.listen(TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).unwrap());
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/hook?token=hunter2", self.port)
    }
    fn requests(&self) -> MutexGuard<'_, Vec<Request>> {
        self.shared.requests.lock().unwrap()
    }
    fn count(&self) -> usize {
        self.requests().len()
    }
    /// Headers and body of each event.
    pub(crate) fn received(&self) -> Vec<(Pairs, Vec<u8>)> {
        let requests = self.requests();
        let posts = requests.iter().filter(|request| request.line.starts_with("POST "));
        posts.map(|request| (request.headers.clone(), request.body.clone())).collect()
    }
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

fn serve(stream: &mut dyn Stream, requests: &Mutex<Vec<Request>>, replies: &[Reply]) -> std::io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.push(byte[0]);
        }
        let mut lines = head.split(|b| *b == b'\n').map(|line| line.trim_ascii_end());
        let line = String::from_utf8(lines.next().unwrap().to_vec()).unwrap();
        let mut headers = Vec::new();
        for pair in lines.filter(|line| !line.is_empty()) {
            let colon = pair.iter().position(|b| *b == b':').unwrap();
            let name = std::str::from_utf8(&pair[..colon]).unwrap().to_lowercase();
            headers.push((name, pair[colon + 1..].trim_ascii_start().to_vec()));
        }
        let length = headers.iter().find(|(name, _)| name == "content-length");
        let mut body = vec![0; length.map_or(0, |(_, n)| std::str::from_utf8(n).unwrap().parse().unwrap())];
        stream.read_exact(&mut body)?;
        let served = {
            let mut requests = requests.lock().unwrap();
            requests.push(Request { line, headers, body });
            requests.len()
        };
        match replies[(served - 1).min(replies.len() - 1)] {
            Reply::Say(text) => stream.write_all(text.as_bytes())?,
            Reply::Hangup => return Ok(()),
            Reply::Silence => return stream.read_exact(&mut [0]),
            Reply::Flood => {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n")?;
                loop {
                    stream.write_all(&[b'x'; 65_536])?;
                }
            }
        }
    }
}

fn sink_with(url: &str, more: &str) -> WebhookSink {
    let _ = rustls::crypto::ring::default_provider().install_default(); // another test may have been first
    let secret = STANDARD.encode(KEY);
    let json = format!(r#"{{"url": "{url}", "secret": "whsec_{secret}"{more}}}"#);
    WebhookSink::new(&serde_json::from_str::<WebhookConfig>(&json).unwrap()).unwrap()
}

pub(crate) fn sink(url: &str) -> WebhookSink {
    sink_with(url, r#", "allow_private": true"#)
}

async fn post(sink: &WebhookSink) -> Result<(), SendError> {
    within(sink.send(&[message("orders", 7, "42", br#"{"total": 10}"#)])).await.remove(0)
}

async fn refusal(sink: &WebhookSink) -> SendError {
    let error = post(sink).await.unwrap_err();
    assert!(!error.message.contains("hunter2"), "the URL's query is secret: {error}");
    error
}

/// As a receiver verifies it: the signature is over the very bytes of the body.
fn signed(request: &Request) {
    let timestamp = request.header("webhook-timestamp");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    assert!(now - timestamp.parse::<u64>().unwrap() <= DEADLINE.as_secs());
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(&KEY).unwrap();
    mac.update(format!("{}.{timestamp}.", request.header("webhook-id")).as_bytes());
    mac.update(&request.body);
    assert_eq!(request.header("webhook-signature"), format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())));
}

#[tokio::test]
async fn case_k9_id_and_signature_over_attempts() {
    let receiver = Receiver::start(&[Reply::Say("HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\nOops"), OK]);
    let sink = sink(&receiver.url());
    let error = refusal(&sink).await;
    assert_eq!(
        (error.kind, error.message),
        (SendErrorKind::Failed, format!("http://127.0.0.1:{} answered 500 Internal Server Error", receiver.port))
    );
    post(&sink).await.unwrap();
    let requests = receiver.requests();
    assert_eq!(requests.len(), 2);
    for request in &*requests {
        assert_eq!(request.line, "POST /hook?token=hunter2 HTTP/1.1");
        assert_eq!(request.body, br#"{"total": 10}"#);
        assert_eq!(request.header("webhook-id"), "00000000-0000-0000-0000-000000000007");
        assert_eq!(request.header("content-type"), "application/json");
        assert_eq!(request.header("event-type"), "order.placed");
        signed(request);
    }
}

#[tokio::test]
async fn cloudevents_over_http_in_both_modes() {
    let receiver = Receiver::start(&[OK]);
    let sink = sink(&receiver.url());
    let parts = parts(7, "4\"2", Some(br#"{"total": 10}"#));
    for envelope in [Envelope::CloudEventsBinary, Envelope::CloudEventsStructured] {
        assert_eq!(kinds(&within(sink.send(&[routed("orders", envelope, &parts)])).await), [None]);
    }
    let requests = receiver.requests();
    let [binary, structured] = &**requests else { panic!("{} requests", requests.len()) };
    signed(binary);
    assert_eq!(binary.body, br#"{"total": 10}"#);
    for (name, value) in [
        ("content-type", "application/json"),
        ("ce-specversion", "1.0"),
        ("ce-id", "00000000-0000-0000-0000-000000000007"),
        ("ce-type", "order.placed"),
        ("ce-subject", "4%222"), // as the HTTP binding writes what is no plain text
    ] {
        assert_eq!(binary.header(name), value);
    }
    signed(structured);
    assert_eq!(structured.header("content-type"), "application/cloudevents+json");
    assert!(structured.headers.iter().all(|(name, _)| !name.starts_with("ce-")));
    let document: serde_json::Value = serde_json::from_slice(&structured.body).unwrap();
    let field = |name: &str| document[name].as_str().unwrap().to_owned();
    let fields = ["specversion", "id", "type", "subject"].map(field);
    assert_eq!(fields, ["1.0", "00000000-0000-0000-0000-000000000007", "order.placed", "4\"2"]);
    assert_eq!(document["data"]["total"], 10);
}

#[tokio::test]
async fn case_k9_what_each_answer_means() {
    use SendErrorKind::{Failed, Rejected, Unavailable};
    for (answer, kind, retry_after, says) in [
        ("429 Too Many Requests\r\nretry-after: 7", Unavailable, Some(7), "429"),
        ("503 Service Unavailable\r\nretry-after: 7", Unavailable, Some(7), "503"),
        ("503 Service Unavailable", Unavailable, None, "503"),
        ("500 Oops", Failed, None, "500"),
        ("400 Bad Request", Failed, None, "400"),
        ("401 Unauthorized", Failed, None, "does the receiver know the secret"),
        ("404 Not Found", Failed, None, "404"),
        ("410 Gone", Rejected, None, "wants no more events"),
        ("413 Too Large", Rejected, None, "the body has 13 bytes: raise the receiver's limit"),
        ("422 Unprocessable", Failed, None, "422"),
    ] {
        let text: &'static str = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n").leak();
        let receiver = Receiver::start(&[Reply::Say(text)]);
        let error = refusal(&sink(&receiver.url())).await;
        assert_eq!((error.kind, error.retry_after), (kind, retry_after.map(Duration::from_secs)), "{answer}");
        assert!(error.message.contains(says), "{error}");
    }
    let receiver = Receiver::start(&[Reply::Say("not HTTP at all\r\n\r\n")]);
    assert_eq!(refusal(&sink(&receiver.url())).await.kind, Failed);
}

#[tokio::test]
async fn case_k9_redirects_are_not_followed() {
    let target = Receiver::start(&[OK]);
    let text: &'static str =
        format!("HTTP/1.1 307 Over There\r\nlocation: {}\r\ncontent-length: 0\r\n\r\n", target.url()).leak();
    let error = refusal(&sink(&Receiver::start(&[Reply::Say(text)]).url())).await;
    assert_eq!(error.kind, SendErrorKind::Failed);
    assert!(error.message.contains("redirects are not followed"), "{error}");
    assert_eq!(target.count(), 0);
}

#[tokio::test]
async fn case_k9_silence_and_broken_connections_are_answers_about_this_event() {
    let silent = Receiver::start(&[Reply::Silence]);
    let error = refusal(&sink_with(&silent.url(), r#", "allow_private": true, "timeout": "300ms""#)).await;
    assert_eq!(error.kind, SendErrorKind::Failed);
    assert!(error.message.contains("did not answer in time"), "{error}");
    assert_eq!(silent.count(), 1);

    let error = refusal(&sink(&Receiver::start(&[Reply::Hangup]).url())).await;
    assert_eq!(error.kind, SendErrorKind::Failed);
    assert!(error.message.contains("broke the connection"), "{error}");
}

#[tokio::test]
async fn case_k9_a_body_without_end_ends_here() {
    post(&sink(&Receiver::start(&[Reply::Flood]).url())).await.unwrap();
}

#[tokio::test]
async fn case_k9_a_receiver_that_is_not_there_costs_no_attempt() {
    let gone = format!("http://127.0.0.1:{}/", free_port().unwrap());
    let sink = sink(&gone);
    let error = refusal(&sink).await;
    assert_eq!(error.kind, SendErrorKind::Unavailable);
    assert!(error.message.contains("cannot be reached: Connection refused"), "{error}");
    assert_eq!(within(sink.check()).await.unwrap_err().kind, SendErrorKind::Unavailable);
    let error = refusal(&super::webhook::sink("http://no-such-host.invalid/")).await;
    assert_eq!(error.kind, SendErrorKind::Unavailable);
}

#[tokio::test]
async fn case_k9_private_addresses_are_refused_unless_allowed() {
    let receiver = Receiver::start(&[OK]);
    let named = format!("http://localhost:{}/", receiver.port);
    // The event names the address itself; then a name leads there.
    let sink = sink_with("https://example.org/", "");
    let own = |url: &str| routed("t", Envelope::Plain, &EventParts { destination: Some(url), ..parts(1, "k", None) });
    for url in [&receiver.url(), &named, &format!("http://[::ffff:127.0.0.1]:{}/", receiver.port)] {
        let outcomes = within(sink.send(&[own(url)])).await;
        assert_eq!(kinds(&outcomes), [Some(SendErrorKind::Failed)]);
        let text = outcomes[0].clone().unwrap_err().message;
        assert!(text.contains("allow_private = true"), "{text}");
    }
    assert_eq!(receiver.count(), 0);
    assert!(within(sink_with(&named, "").check()).await.unwrap_err().message.contains("allow_private = true"));
    assert!(sink.unusable(&receiver.url()).is_some());
    assert!(sink.unusable("orders").is_none() && sink.unusable("https://example.org/x").is_none());

    let allowed = sink_with("https://example.org/", r#", "allow_private": true"#);
    assert_eq!(kinds(&within(allowed.send(&[own(&named)])).await), [None]);
    assert_eq!(receiver.count(), 1);
}

#[tokio::test]
async fn a_request_that_is_given_up_is_not_sent_again() {
    let receiver = Receiver::start(&[Reply::Silence, OK]);
    let sink = sink(&receiver.url());
    let batch = [message("orders", 1, "k", b"1")];
    let mut send = Box::pin(sink.send(&batch));
    while receiver.count() == 0 {
        assert!(futures_util::poll!(&mut send).is_pending());
        tokio::task::yield_now().await;
    }
    drop(send);
    post(&sink).await.unwrap();
    let ids: Vec<_> = receiver.requests().iter().map(|r| r.header("webhook-id").to_owned()).collect();
    assert_eq!(ids, ["00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000007"]);
}

/// A CA and a certificate of its making for `name`, valid for so many days (negative: expired).
fn certificate(folder: &Path, name: &str, days: i32) -> Arc<rustls::ServerConfig> {
    let script = format!(
        "set -e; cd {folder}
         [ -f ca.pem ] || openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=test-ca -keyout ca.key -out ca.pem
         openssl req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr
         printf 'subjectAltName=DNS:{name}\\nbasicConstraints=CA:FALSE\\n' > san
         openssl x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days {days} -extfile san -out {name}.pem",
        folder = folder.display()
    );
    let made = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let chain =
        CertificateDer::pem_file_iter(folder.join(format!("{name}.pem"))).unwrap().collect::<Result<_, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(folder.join(format!("{name}.key"))).unwrap();
    Arc::new(rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap())
}

fn tls_receiver(config: Arc<rustls::ServerConfig>) -> Receiver {
    Receiver::start_with(&[OK], move |tcp| {
        let connection = rustls::ServerConnection::new(config.clone()).ok()?;
        Some(Box::new(rustls::StreamOwned::new(connection, tcp)) as Box<dyn Stream>)
    })
}

#[tokio::test]
async fn case_t1_certificates_are_verified() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sink = |receiver: &Receiver| {
        let more = format!(r#", "allow_private": true, "ca_file": "{}/ca.pem""#, ours.path().display());
        sink_with(&format!("https://localhost:{}/", receiver.port), &more)
    };
    let good = tls_receiver(certificate(ours.path(), "localhost", 10));
    within(sink(&good).check()).await.unwrap();
    let other = format!("https://localhost:{}/other", good.port);
    assert!(within(sink(&good).check_urls(&[&other, "orders"])).await.is_empty());
    post(&sink(&good)).await.unwrap();
    let lines: Vec<String> = good.requests().iter().map(|request| request.line.clone()).collect();
    assert_eq!(lines, ["OPTIONS / HTTP/1.1", "OPTIONS /other HTTP/1.1", "POST / HTTP/1.1"]);
    for (receiver, says) in [
        (tls_receiver(certificate(ours.path(), "elsewhere", 10)), "not valid for name"),
        (tls_receiver(certificate(theirs.path(), "localhost", 10)), "invalid peer certificate: BadSignature"),
        (tls_receiver(certificate(ours.path(), "localhost", -1)), "invalid peer certificate: Expired"),
    ] {
        let (sink, url) = (sink(&receiver), format!("https://localhost:{}/other", receiver.port));
        let wrong = within(sink.check_urls(&[&url, "orders"])).await;
        assert!(wrong.len() == 1 && wrong[0].contains(says), "{wrong:?}");
        for error in [refusal(&sink).await, within(sink.check()).await.unwrap_err()] {
            assert_eq!((error.kind, receiver.count()), (SendErrorKind::Unavailable, 0), "{error}");
            assert!(error.message.contains(says), "{error}");
        }
    }
}
