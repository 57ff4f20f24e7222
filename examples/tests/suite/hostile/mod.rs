//! What others do to the files of programs: nothing is lost, and nothing of theirs is touched.
mod steps;
