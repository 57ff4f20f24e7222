//! Which flags are for which commands.

use std::ffi::OsString;

use Command::{BenchServe, Export, Generate, Info, Merge, Score, Serve, Train};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, CommandFactory, ValueEnum};
use examples::cli::{Checked, UsageError};

use crate::args::Args;
use crate::command::Command;

/// The commands of the flags under each heading of the help.
const HEADINGS: [(&str, &[Command]); 9] = [
    ("Model", &[Generate, Train, Serve, Score, Info]),
    ("Export", &[Export, Merge]),
    ("Ranks", &[Generate, Train, Serve, Score]),
    ("Text", &[Generate]),
    ("Server", &[Serve]),
    ("Load", &[BenchServe]),
    ("Scoring", &[Score]),
    ("Training", &[Train]),
    ("Output", &[Generate, Train, BenchServe, Score, Info, Export, Merge]),
];

/// The commands of flags that are not those of their heading.
const FLAGS: [(&str, &[Command]); 14] = [
    ("adapter", &[Generate, Train, Serve, Score, Export, Merge]),
    ("dtype", &[Generate, Train, Serve, Score, Info, Merge]),
    ("model", &[Generate, Train, Serve, BenchServe, Score, Info, Export, Merge]),
    ("seed", &[Generate, Train, Serve, BenchServe, Score, Info]),
    ("ignore_field", &[Generate, Train, Serve, Score, Info, Export, Merge]),
    ("tp", &[Generate, Train, Serve, Score, Info]),
    ("dp", &[Train, Serve]),
    ("cp", &[Generate, Train, Serve, Score]),
    ("ep", &[Generate, Train, Serve, Score, Info]),
    ("shares", &[Generate, Train, Serve, Score, Info]),
    ("dequantize", &[Generate, Serve, Score, Info]),
    ("cache_dtype", &[Generate, Serve]),
    ("cache_tokens", &[Generate, Serve]),
    ("batch", &[Generate, Train]),
];

/// Returns the commands that a flag is for; `None` for what is no flag of the program.
fn commands_of(flag: &Arg) -> Option<&'static [Command]> {
    let own = FLAGS.iter().find(|(id, _)| flag.get_id() == id);
    let heading = || HEADINGS.iter().find(|(heading, _)| flag.get_help_heading() == Some(heading));
    own.or_else(heading).map(|(_, commands)| *commands)
}

fn applies(flag: &Arg, command: Command) -> bool {
    commands_of(flag).is_none_or(|commands| commands.contains(&command))
}

/// Hides the flags that are not for the command of these arguments from the help.
pub(crate) fn hide(definition: clap::Command, arguments: &[OsString]) -> clap::Command {
    let named = |argument: &OsString| Command::from_str(argument.to_str()?, false).ok();
    match arguments.get(1).and_then(named) {
        Some(command) => definition.mut_args(|flag| {
            let is_hidden = flag.is_hide_set() || !applies(&flag, command);
            flag.hide(is_hidden)
        }),
        None => definition,
    }
}

/// Refuses flags that are not for the command.
pub(crate) fn check(matches: &ArgMatches) -> Checked {
    let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let named = matches.get_one::<Command>("command").copied();
    let command = named.unwrap_or(if is_given("train") { Train } else { Generate });
    let definition = Args::command();
    let wrong =
        definition.get_arguments().find(|flag| is_given(flag.get_id().as_str()) && !applies(flag, command));
    let Some(flag) = wrong else { return Ok(()) };
    let (flag, name) = (flag.get_long().unwrap_or_default(), command.name());
    Err(UsageError(format!("--{flag} has no effect with {name}: leave it out, or see lm {name} --help.")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_flag_is_for_some_command() {
        for flag in Args::command().get_arguments() {
            let is_flag = !["command", "help", "version"].contains(&flag.get_id().as_str());
            let commands = commands_of(flag);
            assert_eq!(commands.is_some_and(|commands| !commands.is_empty()), is_flag, "{}", flag.get_id());
        }
        for (id, _) in FLAGS {
            assert!(Args::command().get_arguments().any(|flag| flag.get_id() == id), "{id}");
        }
    }
}
