//! The dispatcher: the library's calls as those of a group.
//!
//! ```text
//! calls           the trait: each of its functions, for either mode; its end
//! steps           what these share: checks, the collective around a call, errors told, rows there and back
//! join            whether all ranks can have the dispatcher
//! state           the dispatcher's fields
//! collective      the library's collectives as ones of the communicator
//! groups          the library's groups and handles for what a spec asks for
//! library_handle  a handle of either mode; handle_pool: low latency's, which are used again
//! prepare         routing that the GPUs make among themselves
//! windows         memory that rows arrive in and leave from; window_pool: whose turn it is
//! low_latency     low latency: its groups and routings, rows there and back (rows)
//! ```

mod calls;
mod collective;
mod groups;
mod handle_pool;
mod join;
mod library_handle;
mod low_latency;
mod prepare;
mod state;
mod steps;
mod window_pool;
mod windows;

pub use state::NcclEp;
