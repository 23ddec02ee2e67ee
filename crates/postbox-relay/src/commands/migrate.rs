//! `postbox migrate`: the tables and functions, made or brought up to date, or printed.

use super::print;
use crate::cli::MigrateArgs;
use crate::config::Config;
use crate::failure::Failure;
use postbox_sources::admin::Roles;

pub(crate) async fn run(config: &Config, args: &MigrateArgs) -> Result<(), Failure> {
    let admin = crate::database::admin(config)?;
    let roles = args.roles.as_ref();
    if args.print {
        return print(&admin.migrate_script(roles)?);
    }
    let found = admin.migrate(roles).await?;
    let now = admin.version();
    match found {
        found if found == now => eprintln!("the tables are at version {now} already; nothing to do"),
        0 => eprintln!("the tables are there, at version {now}; next: postbox check"),
        found => eprintln!("the tables were at version {found} and are at {now} now"),
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
