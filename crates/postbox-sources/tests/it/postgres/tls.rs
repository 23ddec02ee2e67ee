//! Case T1: TLS against a real server with a certificate of an authority of our own.

use super::{Db, acquire, drain, in_time};
use postbox_engine::{Log, SourceErrorKind};
use postbox_sources::postgres::{PostgresLog, PostgresOptions};
use postbox_testkit::services::{PgVersion, Postgres};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::process::Command;

/// An authority, and a certificate by it for `localhost`; as `ca.pem`, `server.crt` and `server.key`.
const CERTIFICATES: &str = "\
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr
printf 'subjectAltName=DNS:localhost\\n' > names
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.crt";

fn with_tls(server: &Postgres) {
    let data = server.folder().join("data");
    let made = Command::new("sh").arg("-ec").arg(CERTIFICATES).current_dir(&data).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let owner = std::fs::metadata(&data).unwrap();
    for file in ["server.key", "server.crt"] {
        std::fs::set_permissions(data.join(file), PermissionsExt::from_mode(0o600)).unwrap();
        chown(data.join(file), Some(owner.uid()), Some(owner.gid())).unwrap();
    }
    server.execute("postgres", "ALTER SYSTEM SET ssl = on").unwrap();
    server.execute("postgres", "SELECT pg_reload_conf()").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_t1_the_servers_certificate_is_checked_as_the_url_says() {
    let server = Postgres::start(PgVersion::V15).unwrap();
    with_tls(&server);
    let db = Db::on(&server, "postbox").await;
    let reloaded = async { while db.one::<String>("SELECT current_setting('ssl')").await != "on" {} };
    in_time("the server has reloaded its settings", reloaded).await;
    let ca = server.folder().join("data/ca.pem").display().to_string();
    let database = db.url.rsplit('/').next().unwrap();
    let url = |host: &str, options: &str| format!("postgres://postgres@{host}:{}/{database}?{options}", server.port());
    let folder = server.folder().join("data").display().to_string().replace('/', "%2F");
    for good in [
        url("localhost", &format!("sslmode=verify-full&sslrootcert={ca}")),
        url("127.0.0.1", &format!("sslmode=verify-ca&sslrootcert={ca}")),
        url("127.0.0.1", "sslmode=require"),
        format!("postgres://postgres@{folder}:{}/{database}", server.port()),
    ] {
        let log = PostgresLog::new(PostgresOptions::new(&good));
        acquire(&log).await;
        db.insert(1, 1).await;
        assert_eq!(drain(&log, 1).await.len(), 1, "events come: {good}");
        let plain = "SELECT count(*) FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE application_name LIKE 'postbox %' \
                     AND NOT ssl AND client_addr IS NOT NULL";
        assert_eq!(db.one::<i64>(plain).await, 0, "no connection is in plain text: {good}");
        log.release().await.unwrap();
    }
    for (bad, word) in [
        (url("127.0.0.1", &format!("sslmode=verify-full&sslrootcert={ca}")), "certificate"),
        (url("localhost", "sslmode=verify-full"), "certificate"),
        (url("localhost", "sslmode=verify-full&sslrootcert=/nowhere.pem"), "/nowhere.pem"),
    ] {
        let error = PostgresLog::new(PostgresOptions::new(&bad)).acquire().await.expect_err("not to be trusted");
        assert!(error.message.contains(word), "{word}: {error}");
        assert_eq!(error.kind, SourceErrorKind::Refused, "{error}");
    }
    server.execute("postgres", "ALTER SYSTEM SET ssl = off").unwrap();
    server.execute("postgres", "SELECT pg_reload_conf()").unwrap();
    let without = async { while db.one::<String>("SELECT current_setting('ssl')").await != "off" {} };
    in_time("the server has reloaded its settings", without).await;
    let url = url("127.0.0.1", "sslmode=require");
    let error = PostgresLog::new(PostgresOptions::new(&url)).acquire().await.expect_err("no quiet downgrade");
    assert!(error.message.contains("TLS"), "{error}");
}
