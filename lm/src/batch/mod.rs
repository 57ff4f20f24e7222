//! Many prompts in one run: as many as there are slots are continued together, and a prompt takes the place of a text that
//! has ended.

pub mod args;
pub mod program;
pub mod prompts;
pub mod report;
