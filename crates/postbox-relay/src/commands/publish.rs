use crate::cli::PublishArgs;
use crate::config::Config;
use crate::failure::Failure;
pub(crate) async fn run(_config: &Config, _args: &PublishArgs) -> Result<(), Failure> {
    Err(Failure::failed("publish is not in this build yet"))
}
