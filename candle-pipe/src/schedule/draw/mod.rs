//! Pictures of one timeline, or of several for comparison, such as a prediction and a measurement.
mod chrome;
mod svg;
mod text;

pub use chrome::{save_chrome, write_chrome};
pub use svg::svg;
pub use text::text;
