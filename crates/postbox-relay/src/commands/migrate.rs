//! `postbox migrate`: the tables and functions, made or brought up to date, or printed.

use super::print;
use crate::cli::MigrateArgs;
use crate::config::{Config, show_duration};
use crate::failure::Failure;
use crate::screen;
use postbox_sources::admin::{Migrated, Roles};

pub(crate) async fn run(config: &Config, args: &MigrateArgs) -> Result<(), Failure> {
    let admin = crate::database::admin(config)?;
    match &args.roles {
        Some(roles) => return print(&admin.roles_script(roles).map_err(|error| Failure::usage(error.message))?),
        None if args.print => return print(&admin.migrate_script()?),
        None => {}
    }
    let Migrated { from, to, retention_changed } = admin.migrate().await?;
    match from {
        0 => screen::tell(&format!("the tables are there, at version {to}; next: postbox check")),
        _ if from < to => screen::tell(&format!("the tables were at version {from} and are at {to} now")),
        _ if !retention_changed => screen::tell(&format!("the tables are at version {to} already; nothing to do")),
        _ => {}
    }
    if retention_changed {
        let retention = show_duration(config.source.retention);
        screen::tell(&format!(
            "published events stay for {retention} from now on; restart the relays that were told otherwise"
        ));
    }
    Ok(())
}

/// "WRITER,RELAY" of the command line.
pub(crate) fn roles(text: &str) -> Result<Roles, String> {
    match text.split_once(',') {
        Some((writer, relay)) if !writer.is_empty() && !relay.is_empty() && !relay.contains(',') => {
            Ok(Roles { writer: writer.into(), relay: relay.into() })
        }
        _ => Err("two role names with a comma between them, as in shop,shop_relay".into()),
    }
}
