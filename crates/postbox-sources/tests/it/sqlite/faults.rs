//! What can be wrong with the file: each a clear error that names the file and the remedy, and nothing is lost.

use super::{DEADLINE, File, LIMIT, insert, publish, settle, soon, texts};
use postbox_engine::{ClaimLimit, DeadPolicy, Log, LogSource, Source, SourceError, SourceErrorKind, Verdict};
use postbox_sources::sqlite::{Options, SqliteLog, admin, migrate, version};
use std::path::Path;
use std::process::Command;
use tokio::time::Instant;

async fn acquire_error(options: Options) -> SourceError {
    soon(SqliteLog::new(options).acquire()).await.expect_err("it cannot work")
}

fn assert_says(error: &SourceError, kind: SourceErrorKind, words: &[&str]) {
    assert_eq!(error.kind, kind, "{error}");
    words.iter().for_each(|word| assert!(error.to_string().contains(word), "{word:?} in: {error}"));
}

#[tokio::test]
async fn wrong_files_are_named_with_their_remedy() {
    use SourceErrorKind::Refused;
    let file = File::unmigrated();
    let error = acquire_error(file.options("r")).await;
    assert_says(&error, Refused, &["shop.db", "no such file", "postbox migrate"]);
    let nowhere = Path::new("/nowhere/shop.db");
    assert_says(&migrate(nowhere, "postbox").unwrap_err(), Refused, &["/nowhere/shop.db", "Correct the path"]);
    assert_says(&version(nowhere, "postbox").unwrap_err(), Refused, &["no such file"]);

    std::fs::write(&file.path, "a text of more than a hundred bytes, which is no database. ".repeat(20)).unwrap();
    assert_says(&acquire_error(file.options("r")).await, Refused, &["shop.db", "no SQLite database"]);
    assert_says(&migrate(&file.path, "postbox").unwrap_err(), Refused, &["no SQLite database"]);
    let findings = admin::check(&file.path, "postbox").await;
    assert!(findings.iter().any(|f| !f.ok && f.what.contains("no SQLite database")), "{findings:?}");

    std::fs::write(&file.path, "").unwrap();
    let error = acquire_error(file.options("r")).await;
    assert_says(&error, Refused, &["shop.db", "no tables of postbox", "postbox migrate"]);
    let findings = admin::check(&file.path, "postbox").await;
    assert!(findings.iter().any(|f| !f.ok && f.remedy.as_deref() == Some("postbox migrate")), "{findings:?}");

    migrate(&file.path, "postbox").unwrap();
    file.connect().execute("INSERT INTO postbox_migration VALUES (99, '', 0)", []).unwrap();
    assert_says(&acquire_error(file.options("r")).await, Refused, &["version 99", "Upgrade postbox"]);
}

#[tokio::test]
async fn a_lock_that_is_never_given_back_is_named_and_nothing_is_lost() {
    let file = File::new();
    insert(&file.connect(), "a", 1);
    // The settle gives up after so many tries, which take as long as the machine lets them; the lease outlasts them.
    let options = Options { lease: 60 * DEADLINE, ..file.options("r") };
    let source = LogSource::new(SqliteLog::new(options), DeadPolicy::Skip);
    soon(source.acquire()).await.unwrap();
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    let hog = file.connect();
    hog.execute_batch("BEGIN IMMEDIATE").unwrap();
    insert(&hog, "a", 2);
    let published =
        |c: &postbox_engine::Claimed| postbox_engine::Settlement { ticket: c.ticket, verdict: Verdict::Published };
    let all: Vec<_> = claim.events.iter().map(published).collect();
    let given_up = tokio::time::timeout(10 * DEADLINE, source.settle(&all, Instant::now()));
    let error = given_up.await.expect("it does not wait for ever").unwrap_err();
    assert_says(&error, SourceErrorKind::Unavailable, &["shop.db", "write lock", "long transaction"]);
    // A relay that stands by needs no lock, and new events need none to be read.
    assert!(file.log("standing by").acquire().await.unwrap().is_err());
    hog.execute_batch("COMMIT").unwrap();
    soon(source.acquire()).await.unwrap();
    assert_eq!(publish(&source, 2).await, ["a 1", "a 2"]);
}

/// The embedded default migrates at each start.
#[test]
fn a_current_file_is_migrated_without_the_lock_of_its_writers() {
    let file = File::new();
    let writer = file.connect();
    writer.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert_eq!(migrate(&file.path, "postbox").unwrap(), version(&file.path, "postbox").unwrap());
}

/// Of the copies of a file, only the one at the path counts.
#[tokio::test]
async fn a_file_replaced_under_the_relay_ends_its_tenure() {
    let (file, other) = (File::new(), File::new());
    let source = file.source("r").await;
    insert(&other.connect(), "new", 1);
    other.connect().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    std::fs::rename(&other.path, &file.path).unwrap();
    let error = soon(source.claim(LIMIT)).await.unwrap_err();
    assert_says(&error, SourceErrorKind::Unavailable, &["shop.db", "replaced"]);
    assert_eq!(source.renew().await.unwrap_err().kind, SourceErrorKind::Unavailable);
    for suffix in ["-wal", "-shm"] {
        // They belong to the old file.
        let _ = std::fs::remove_file(file.path.with_file_name(format!("shop.db{suffix}")));
    }
    soon(source.acquire()).await.unwrap();
    assert_eq!(publish(&source, 1).await, ["new 1"]);

    std::fs::remove_file(&file.path).unwrap();
    let error = soon(source.claim(LIMIT)).await.unwrap_err();
    assert_says(&error, SourceErrorKind::Unavailable, &["shop.db", "gone"]);
    let error = soon(source.acquire()).await.unwrap_err();
    assert_says(&error, SourceErrorKind::Unavailable, &["no such file", "postbox migrate"]); // it has worked
    std::fs::write(&file.path, "").unwrap();
    let error = soon(source.acquire()).await.unwrap_err();
    assert_says(&error, SourceErrorKind::Unavailable, &["postbox migrate"]);

    let another = File::new();
    insert(&another.connect(), "back", 1);
    another.connect().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    std::fs::rename(&another.path, &file.path).unwrap();
    soon(source.acquire()).await.unwrap();
    assert_eq!(publish(&source, 1).await, ["back 1"]);
}

/// A backup is written back into the file while the relay runs: new events get the numbers of lost ones, which the
/// relay has passed in memory. R5.
#[tokio::test]
async fn case_r5_a_database_put_back_under_the_relay_is_read_anew() {
    let file = File::new();
    let db = file.connect();
    let source = file.source("r").await;
    insert(&db, "a", 1);
    publish(&source, 1).await;
    let backup = file.path.with_file_name("backup.db");
    db.execute("VACUUM INTO ?1", [backup.to_str().unwrap()]).unwrap();
    source.renew().await.unwrap();
    (2..=5).for_each(|n| insert(&db, "lost", n));
    publish(&source, 4).await;
    let restore = "ATTACH ?1 AS b";
    db.execute(restore, [backup.to_str().unwrap()]).unwrap();
    db.execute_batch(
        "BEGIN; DROP TRIGGER postbox_outbox_append;
         DELETE FROM postbox_outbox; INSERT INTO postbox_outbox SELECT * FROM b.postbox_outbox;
         DELETE FROM postbox_cursor; INSERT INTO postbox_cursor SELECT * FROM b.postbox_cursor;
         DELETE FROM postbox_lease; INSERT INTO postbox_lease SELECT * FROM b.postbox_lease;
         UPDATE sqlite_sequence SET seq = (SELECT seq FROM b.sqlite_sequence WHERE name = 'postbox_outbox') WHERE name = 'postbox_outbox';",
    )
    .unwrap();
    (2..=6).for_each(|n| insert(&db, "new", n));
    db.execute_batch("COMMIT").unwrap();
    let error = soon(source.claim(LIMIT)).await.unwrap_err();
    assert_says(&error, SourceErrorKind::Unavailable, &["shop.db", "earlier state"]);
    soon(source.acquire()).await.unwrap();
    assert_eq!(publish(&source, 5).await, ["new 2", "new 3", "new 4", "new 5", "new 6"]);
}

/// The outbox dropped and made anew counts from one again, and the cursor stands at two.
#[tokio::test]
async fn case_v1_an_outbox_made_anew_is_refused_and_the_remedy_works() {
    let file = File::new();
    let db = file.connect();
    let source = file.source("r").await;
    (1..=2).for_each(|n| insert(&db, "a", n));
    publish(&source, 2).await;
    source.release().await.unwrap();
    db.execute("DELETE FROM sqlite_sequence", []).unwrap();
    db.execute("DELETE FROM postbox_outbox", []).unwrap();
    let refused =
        db.execute("INSERT INTO postbox_outbox (aggregate_type, aggregate_id, event_type) VALUES ('a', '1', 'e')", []);
    assert!(refused.is_err(), "it would never be sent");
    let error = acquire_error(file.options("next")).await;
    assert_says(&error, SourceErrorKind::Refused, &["has passed event 2", "made anew"]);
    let findings = admin::check(&file.path, "postbox").await;
    let remedy = findings.iter().find(|f| !f.ok).and_then(|f| f.remedy.clone()).unwrap();
    assert!(error.to_string().ends_with(&remedy), "{error}");
    db.execute(&remedy, []).unwrap();
    insert(&db, "a", 3);
    assert_eq!(publish(&file.source("next").await, 1).await, ["a 3"]);
}

/// SQLITE_FULL in the middle of a record: nothing of it is written, and it works when there is room again.
#[tokio::test]
async fn disk_full_in_a_record_changes_nothing() {
    let file = File::new();
    let db = file.connect();
    (1..=2).for_each(|n| insert(&db, "a", n));
    let source = file.source("r").await;
    let claim = soon(source.claim(ClaimLimit { events_max: 1, ..LIMIT })).await.unwrap();
    // A table whose numbers are used up answers with the same error as a disk without room.
    db.execute_batch(
        "CREATE TABLE used_up (n INTEGER PRIMARY KEY AUTOINCREMENT); INSERT INTO used_up VALUES (9223372036854775807);
         CREATE TRIGGER full AFTER INSERT ON postbox_cursor BEGIN INSERT INTO used_up VALUES (NULL); END",
    )
    .unwrap();
    let all = [postbox_engine::Settlement { ticket: claim.events[0].ticket, verdict: Verdict::Published }];
    let error = source.settle(&all, Instant::now()).await.unwrap_err();
    assert_says(&error, SourceErrorKind::Unavailable, &["shop.db", "full", "nothing is lost"]);
    assert_eq!(file.count("SELECT count(*) FROM postbox_cursor"), 0);
    db.execute("DROP TRIGGER full", []).unwrap();
    soon(source.acquire()).await.unwrap();
    assert_eq!(publish(&source, 2).await, ["a 1", "a 2"]);
}

/// The same on a real disk of 4 MiB, in a mount namespace of its own.
#[test]
fn a_full_disk_is_named_and_the_relay_goes_on_when_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"mount -t tmpfs -o size=4m none "$1" && exec "$2" full "$1/shop.db" "$1/filler""#;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
    let output = command.arg(folder.path()).arg(super::processes::program()).output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{complained}");
    assert!(said.contains("shop.db") && said.contains("Free some space"), "{said}");
    assert!(said.ends_with("all sent after 1 failure\n"), "{said}");
}

/// A file that may not be written, and a folder in which SQLite's own files cannot be made: by mounts, since root may
/// write everything else.
#[test]
fn a_read_only_file_and_folder_are_named() {
    for read_only in ["shop.db", "."] {
        let file = File::new();
        let script = r#"mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" relay "$3" r"#;
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
        command.arg(file.folder.path().join(read_only)).arg(super::processes::program()).arg(&file.path);
        let output = command.output().unwrap();
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(complained.contains("shop.db: could not") && complained.contains("right to write"), "{complained}");
        assert!(complained.contains("Refused"), "{complained}");
    }
}

#[tokio::test]
async fn a_sound_file_has_no_findings_against_it() {
    let file = File::new();
    let source = LogSource::new(SqliteLog::new(file.options("r")), DeadPolicy::Skip);
    soon(source.acquire()).await.unwrap();
    insert(&file.connect(), "a", 1);
    let claim = soon(source.claim(LIMIT)).await.unwrap();
    assert_eq!(texts(&claim), ["a 1"]);
    settle(&source, &claim, Verdict::Published).await;
    let findings = admin::check(&file.path, "postbox").await;
    assert!(findings.len() >= 5 && findings.iter().all(|f| f.ok), "{findings:?}");
    file.connect().query_row("PRAGMA journal_mode = DELETE", [], |_| Ok(())).unwrap_err(); // the relay has it open
    source.release().await.unwrap();
    drop(source);
    super::until("the relay's thread closes the file", || {
        file.connect().query_row("PRAGMA journal_mode = DELETE", [], |_| Ok(())).is_ok()
    });
    let findings = admin::check(&file.path, "postbox").await;
    assert!(findings.iter().any(|f| !f.ok && f.what.contains("journal_mode")), "{findings:?}");
}
