//! Where events go. [`build`] is the whole registry: an enum and one `match`; one file per sink.
