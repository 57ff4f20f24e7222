//! Attacks on the programs: templates, files and servers of strangers.

mod files;
