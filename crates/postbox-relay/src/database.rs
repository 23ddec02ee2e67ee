//! Which database the configuration names, for the relay and for the commands that look at it.

use crate::config::Config;
use crate::failure::Failure;
use postbox_sources::{AnyAdmin, Location};

pub(crate) fn location(config: &Config) -> Location {
    Location {
        url: config.source.url().expose_secret().to_owned(),
        listen_url: config.source.listen_url.as_ref().map(|url| url.expose_secret().to_owned()),
        password: config.source.password.as_ref().map(|password| password.expose_secret().to_owned()),
        schema: config.source.schema.clone(),
    }
}

pub(crate) fn admin(config: &Config) -> Result<AnyAdmin, Failure> {
    postbox_sources::admin(&location(config), config.source.retention).map_err(named_wrongly)
}

/// What is found before anything is connected to is wrong configuration.
pub(crate) fn named_wrongly(error: postbox_engine::SourceError) -> Failure {
    Failure::usage(error.message).remedy(
        "source.url in postbox.toml, POSTBOX__SOURCE__URL or DATABASE_URL names the database; \
         its neighbours are explained by: postbox config default",
    )
}
