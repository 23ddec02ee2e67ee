//! The program `postbox`. What must be set once per process is set here; everything else is in the library.

use std::process::ExitCode;

/// librdkafka allocates through it too; the system's allocator costs twice the CPU with headers.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    rustls::crypto::ring::default_provider().install_default().expect("nothing was installed before main");
    postbox_relay::cli::main()
}
