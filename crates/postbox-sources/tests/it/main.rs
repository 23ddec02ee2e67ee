<<<<<<< .merge_file_sbGdWf
//! The sources against real databases.

#[cfg(feature = "sqlite")]
mod sqlite;
=======
//! The sources against real servers.

#[cfg(feature = "postgres")]
mod postgres;
>>>>>>> .merge_file_exwE4n
