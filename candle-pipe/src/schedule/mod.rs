//! Schedules as data: the order of the computations of each rank.
//!
//! | step | from | to |
//! |---|---|---|
//! | [`ScheduleKind::schedule`], [`greedy`], [`Schedule::from_csv`] | sizes, costs or text | [`Schedule`]: only computations |
//! | [`Schedule::lower`] | a schedule, the values that its stages exchange ([`Edges`]) and the reductions, as a [`Lowering`] | [`Program`]: the actions of each rank |
//! | [`Schedule::simulate`] | a schedule and the costs of its stages ([`Costs`]) | [`Timeline`]: when each action runs |
//! | [`draw`] | timelines, predicted and measured | text, SVG, Chrome trace |
//!
//! A [`Schedule`] and a [`Program`] are checked when they are created: every one that exists runs to its end.
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
//!
#![doc = include_str!("README.md")]

mod compare;
mod computations;
mod costs;
mod csv;
pub mod draw;
mod edges;
mod generate;
mod kind;
mod lower;
mod parse;
mod program;
mod routes;
mod simulate;
mod stage_order;
mod timeline;
mod validate;
mod walk;

pub use crate::action::{Action, Compute, Flow, Message, Pass};
pub use compare::{Candidate, candidates, fastest};
pub use computations::Schedule;
pub use costs::Costs;
pub use csv::parse_csv;
pub use edges::Edges;
pub use generate::greedy;
pub use kind::ScheduleKind;
pub use lower::Lowering;
pub use program::Program;
pub use stage_order::StageOrder;
pub use timeline::{Span, Timeline};
pub(crate) use walk::DryRun;
