//! Schedules as data: which rank computes what, in which order.
//!
//! | step | from | to |
//! |---|---|---|
//! | [`ScheduleKind::schedule`], [`greedy`], [`Schedule::from_csv`] | sizes, costs or text | [`Schedule`]: computations alone |
//! | [`Schedule::lower`] | a schedule, what its stages exchange ([`Edges`]) and what goes with it, as a [`Lowering`] | [`Program`]: what each rank executes |
//! | [`Schedule::simulate`] | a schedule and what its stages cost ([`Costs`]) | [`Timeline`]: when everything happens |
//! | [`draw`] | timelines, predicted and measured | text, SVG, Chrome trace |
//!
//! Both a [`Schedule`] and a [`Program`] are checked when they are made: whatever exists can be run to its end.
//!
//! ```
//! use candle_pipe::schedule::{Costs, Edges, ScheduleKind};
//!
//! let schedule = "zbv".parse::<ScheduleKind>()?.schedule(4, 8, 2)?;
//! let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0);
//! let timeline = schedule.simulate(&Edges::chain(schedule.stages()), &costs)?;
//! assert_eq!(timeline.makespan(), 25.5);
//! assert_eq!(timeline.bubble_span(), 0.0);
//! # Ok::<(), candle_pipe::Error>(())
//! ```
mod compare;
mod costs;
mod csv;
mod data;
pub mod draw;
mod edges;
mod generate;
mod kind;
mod lower;
mod parse;
mod placement;
mod program;
mod routes;
mod simulate;
mod timeline;
mod validate;
mod walk;

pub use crate::action::{Action, Compute, Flow, Message, Pass};
pub use compare::{Candidate, candidates, fastest};
pub use costs::Costs;
pub use csv::parse_csv;
pub use data::Schedule;
pub use edges::Edges;
pub use generate::greedy;
pub use kind::ScheduleKind;
pub use lower::Lowering;
pub use placement::Placement;
pub use program::Program;
pub use timeline::{Span, Timeline};
