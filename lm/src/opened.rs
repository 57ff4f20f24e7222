//! The model that the command line names.

use std::path::Path;

use anyhow::Result;
use candle_lm::config::Config;
use candle_lm::dtype::DTypeName;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::random_model;
use examples::cli::{self, Checked, require};
use examples::launch::Ranks;

use crate::args::Args;

/// Opens the model. Without one on the command line, it writes a random model to `scratch`.
///
/// # Errors
/// Those of [`Files::open`] and [`check_ranks`].
pub fn files(args: &Args, scratch: &Path) -> Result<Files> {
    let files = args.adapters.add_to(base(args, scratch)?)?;
    check_ranks(args, &files)?;
    Ok(files)
}

/// Opens the model without its adapters.
///
/// # Errors
/// Those of [`Files::open`].
pub fn base(args: &Args, scratch: &Path) -> Result<Files> {
    let folder = args.model.as_deref().unwrap_or(scratch);
    if args.model.is_none() {
        let dtype = args.dtype.unwrap_or(DTypeName::F32);
        random_model::write(folder, &random(args), args.seed(), dtype.into())?;
    }
    Files::open_without(folder, &args.ignore_field)
}

/// The random model of the command line: a mixture if experts are distributed.
pub fn random(args: &Args) -> Config {
    if args.ep > 1 { random_model::mixture() } else { random_model::config() }
}

/// Refuses to distribute what a model does not have, or keeps whole: experts, or the tokens of a text.
///
/// # Errors
/// If `--ep` or `--cp` asks for it.
pub fn check_ranks(args: &Args, files: &Files) -> Checked {
    let (ep, Config { family, parts, .. }) = (args.ep, &files.config);
    require!(
        ep == 1 || parts.experts.is_some(),
        "--ep {ep} distributes experts, and a model of the family {family} has none: leave it out, or cut its layers with --tp."
    );
    let refusal = files.config.refusal_of_token_ranks(args.cp);
    require!(refusal.is_none(), "{}.", refusal.unwrap_or_default());
    Ok(())
}

/// Returns how the model is held and cut.
///
/// # Errors
/// If its files have a dtype that models are not computed in.
pub fn held(args: &Args, files: &Files) -> Result<ModelOptions> {
    Ok(ModelOptions {
        dtype: args.dtype.map_or_else(|| files.dtype(), |dtype| Ok(dtype.into()))?,
        layout: args.layout.clone(),
        dequantize: args.dequantize,
        cache: args.cache_dtype.map(Into::into),
        shares: args.shares.clone(),
        ep: args.ep,
        cp: args.cp,
        dp: args.dp(),
    })
}

/// Prints what the files ask for and is not done.
pub fn note(files: &Files, ranks: &Ranks<'_>) {
    if ranks.is_first() {
        files.unmet.iter().for_each(|unmet| cli::tell("note", format_args!("{unmet}.")));
    }
}
