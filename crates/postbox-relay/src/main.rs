//! The program `postbox`. What must be set once per process is set here; everything else is in the library.

use std::process::ExitCode;

/// librdkafka allocates through it too; the system's allocator costs twice the CPU with headers.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// One arena: each thread has its cache before it, so it costs no CPU, and what one thread frees another can use. Into
/// Kafka from memory, 2 million events peak at 43 MB so; with two arenas at 65, with one per thread and core at 73.
#[allow(unsafe_code)] // jemalloc reads its configuration from a symbol of this name
#[unsafe(export_name = "malloc_conf")]
pub static MALLOC_CONF: &[u8; 47] = b"narenas:1,dirty_decay_ms:1000,muzzy_decay_ms:0\0";

fn main() -> ExitCode {
    rustls::crypto::ring::default_provider().install_default().expect("nothing was installed before main");
    postbox_relay::cli::main()
}
