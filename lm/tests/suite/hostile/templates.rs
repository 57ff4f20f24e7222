//! Chat templates that would take all memory, all time or the stack.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use candle_lm::chat::{ChatMessage, ChatTemplate};
use jiff::civil::date;
use test_utils::Attacks;

/// A namespace whose list `x` is in itself so many times.
fn doubled(times: usize, then: &str) -> String {
    format!(
        "{{% set ns = namespace(x=[1]) %}}{{% for i in range({times}) %}}{{% set ns.x = [ns.x, ns.x] %}}{{% endfor %}}{then}"
    )
}

/// A text that becomes twice as long so many times.
fn grown(step: &str) -> String {
    format!(
        "{{% set ns = namespace(x='aaaaaaaa') %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
    )
}

/// The templates, which must be refused when they are read or rendered.
fn templates() -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    let mut add = |name: &str, source: String| all.push((name.into(), source));
    const MANY: usize = 100_000;
    // Nesting that overflows a parser, or what it makes.
    for (name, open, inside, close) in [
        ("not", "not ", "x", ""),
        ("minus", "-", "1", ""),
        ("attributes", "", "a", ".b"),
        ("items", "", "a", "[0]"),
        ("slices", "", "a", "[:1]"),
        ("calls", "", "a", "()"),
        ("filters", "", "a", "|string"),
        ("tests", "", "a", " is defined"),
        ("parentheses", "(", "1", ")"),
        ("lists", "[", "1", "]"),
        ("tuples", "(1,", "1", ")"),
        ("dicts", "{1:", "1", "}"),
        ("ternaries", "1 if 0 else ", "1", ""),
        ("concatenations", "a~", "a", ""),
        ("sums", "1+", "1", ""),
        ("powers", "1**", "1", ""),
        ("conjunctions", "a and ", "a", ""),
        ("ors", "a or ", "a", ""),
        ("comparisons", "1<", "2", ""),
        ("texts", "'a' ", "'a'", ""),
        ("arguments", "a(", "1", ")"),
        ("named arguments", "a(b=", "1", ")"),
        ("in", "a in ", "a", ""),
    ] {
        add(
            &format!("deep {name}"),
            format!("{{{{ {}{inside}{} }}}}", open.repeat(MANY), close.repeat(MANY)),
        );
        add(
            &format!("deep {name} in a set"),
            format!("{{% set x = {}{inside}{} %}}", open.repeat(MANY / 4), close.repeat(MANY / 4)),
        );
    }
    for (name, open, close) in [
        ("if", "{% if 1 %}", "{% endif %}"),
        ("for", "{% for i in [1] %}", "{% endfor %}"),
        ("with", "{% with %}", "{% endwith %}"),
        ("set", "{% set x %}", "{% endset %}"),
        ("filter", "{% filter upper %}", "{% endfilter %}"),
        ("macro", "{% macro a() %}", "{% endmacro %}"),
        ("call", "{% call a() %}", "{% endcall %}"),
        ("generation", "{% generation %}", "{% endgeneration %}"),
        ("open if", "{% if 1 %}", ""),
    ] {
        add(&format!("deep {name}"), format!("{}{}", open.repeat(30_000), close.repeat(30_000)));
    }
    add("many elif", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(80_000)));
    add("many else if", format!("{}{}", "{% if 0 %}{% else %}".repeat(30_000), "{% endif %}".repeat(30_000)));
    add("a long template", "x".repeat(2 << 20));
    add("a long expression", format!("{{{{ [{}] }}}}", "1,".repeat(MANY)));
    add("targets", format!("{{% set {}x{} = 1 %}}", "(".repeat(MANY), ")".repeat(MANY)));
    add("filters of a set", format!("{{% set x{} %}}{{% endset %}}", "|upper".repeat(MANY)));
    // Lists that are in themselves many times.
    for (name, then) in [
        ("tojson", "{{ ns.x | tojson }}"),
        ("tojson in lines", "{{ ns.x | tojson(indent=4) }}"),
        ("printing", "{{ ns.x }}"),
        ("concatenation", "{{ ns.x ~ '' }}"),
        ("string", "{{ ns.x | string | length }}"),
        ("pprint", "{{ ns.x | pprint }}"),
        ("join", "{{ ns.x | join }}"),
        ("equality", "{% set y = ns.x %}{{ [ns.x, 1] == [y, 2] }}"),
        ("a key", "{% set y = {ns.x: 1} %}"),
        ("get", "{{ {1: 2}.get(ns.x) }}"),
        ("in", "{{ [ns.x] in [[ns.x]] }}"),
        ("sort", "{{ [ns.x, ns.x] | sort }}"),
        ("unique", "{{ [ns.x, ns.x] | unique | list }}"),
        ("max", "{{ [ns.x, ns.x] | max }}"),
        ("groupby", "{{ [ns.x, ns.x] | groupby(0) }}"),
        ("sum", "{{ ns.x | sum(start=[]) }}"),
        ("selectattr", "{{ [ns.x] | selectattr(0, 'eq', ns.x) | list }}"),
        ("sameas", "{{ ns.x is sameas ns.x }}"),
        ("less", "{{ ns.x < ns.x }}"),
        ("changed", "{% for i in [1, 2] %}{{ loop.changed(ns.x) }}{% endfor %}"),
        ("raise", "{{ raise_exception(ns.x) }}"),
        ("percent", "{{ '%s' % (ns.x,) }}"),
        ("format", "{{ '{}'.format(ns.x) }}"),
        ("indent", "{{ ns.x | indent }}"),
        ("undefined key", "{{ {}[ns.x] }}"),
    ] {
        add(&format!("shared lists and {name}"), doubled(60, then));
    }
    let step = "{% set ns.x = {'a': ns.x, 'b': ns.x} %}";
    add(
        "shared dicts",
        format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
        ),
    );
    let step = "{% set ns.x = (ns.x, ns.x) %}";
    add(
        "shared tuples",
        format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x == ns.x }}}}"
        ),
    );
    let step = "{% set ns.x = dict(a=ns.x, b=ns.x) %}";
    add(
        "shared dict()",
        format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
        ),
    );
    // Depth that overflows when it is printed, compared or freed.
    for (name, step) in [
        ("lists", "[ns.x]"),
        ("tuples", "(ns.x,)"),
        ("dicts", "{'a': ns.x}"),
        ("dict()", "dict(a=ns.x)"),
        ("batch", "[ns.x] | batch(1)"),
        ("slice", "[ns.x] | slice(1)"),
        ("items", "{'a': ns.x} | items"),
        ("values", "{'a': ns.x}.values()"),
        ("groupby", "[[ns.x]] | groupby(1, default=1)"),
        ("sum", "[[[ns.x]]] | sum(start=[])"),
        ("dictsort", "{'a': ns.x} | dictsort"),
    ] {
        let walk = "{{ ns.x | tojson | length }}";
        let loops = format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(200000) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
        );
        add(&format!("nested {name}"), format!("{loops}{walk}"));
        add(&format!("nested {name} that are dropped"), loops);
    }
    add("a namespace in itself", "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns.x }}".into());
    add(
        "a namespace in its list",
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x | tojson }}".into(),
    );
    add("a loop in a list", "{% for i in [1] %}{% set x = [loop] %}{{ x }}{% endfor %}".into());
    add(
        "a loop in a namespace",
        "{% set ns = namespace() %}{% for i in [1] %}{% set ns.x = loop %}{% endfor %}{{ ns.x }}".into(),
    );
    // Texts that grow.
    for (name, step) in [
        ("concatenation", "ns.x ~ ns.x"),
        ("plus", "ns.x + ns.x"),
        ("times", "ns.x * 2"),
        ("join", "[ns.x, ns.x] | join"),
        ("join method", "ns.x.join(['a', 'b', 'c'])"),
        ("format", "'{0}{0}'.format(ns.x)"),
        ("percent", "'%s%s' % (ns.x, ns.x)"),
        ("format filter", "'%s%s' | format(ns.x, ns.x)"),
        ("replace", "ns.x | replace('a', 'aa')"),
        ("replace method", "ns.x.replace('a', 'aa')"),
        ("replace nothing", "ns.x.replace('', ns.x)"),
        ("escape", "ns.x | e | replace('a', '&') | e | e"),
        ("tojson", "[ns.x, ns.x] | tojson"),
        ("string", "[ns.x, ns.x] | string"),
        ("indent", "('a\n' ~ ns.x) | indent(ns.x)"),
        ("center", "ns.x.center((ns.x | length) * 2)"),
        ("ljust", "ns.x.ljust((ns.x | length) * 2)"),
        ("zfill", "ns.x.zfill((ns.x | length) * 2)"),
        ("truncate", "(ns.x ~ 'a') | truncate(0, true, ns.x * 2, 0)"),
        ("split", "(ns.x.split('a') | join('aa'))"),
        ("list", "(ns.x | list) * 2"),
        ("list plus", "[ns.x] + [ns.x] + (ns.x | list) + (ns.x | list)"),
        ("upper", "(ns.x | upper) * 2"),
        ("reverse", "(ns.x | reverse) * 2"),
    ] {
        add(&format!("texts that grow by {name}"), grown(step));
    }
    add("a set block that grows", "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}".into());
    add("a macro that grows", "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}".into());
    add("a filter block that grows", "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set y %}{% filter replace('a', 'aa') %}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = y %}{% endfor %}".into());
    // Sizes that are asked for at once.
    for expression in [
        "'a' * 10000000000",
        "'' * 9223372036854775807",
        "[1] * 10000000000",
        "(1,) * 10000000000",
        "9999999999 * 'ab'",
        "range(9999999999)",
        "range(0, 9223372036854775807, 2) | length",
        "'{:>1000000000}'.format(1)",
        "'{:1000000000d}'.format(1)",
        "'{0:{1}}'.format(1, 1000000000)",
        "'%1000000000d' % 1",
        "'%.1000000000f' % 1",
        "'%1000000000s' | format('a')",
        "strftime_now('%999999999d')",
        "strftime_now('%-999999999d')",
        "strftime_now('%_999999999Y')",
        "strftime_now('%c' * 1000)",
        "'a'.center(10000000000)",
        "'a'.ljust(10000000000)",
        "'a'.rjust(10000000000)",
        "'a'.zfill(10000000000)",
        "'a' | center(10000000000)",
        "'a\nb' | indent(10000000000)",
        "[1] | batch(10000000000, 0) | list",
        "[1] | slice(10000000000) | list",
        // The bytes of so many places are more than a number can say.
        "[1] | batch(288230376151711744, 0) | list",
        "[1] | slice(288230376151711744, 0) | list",
        "[1] | tojson(indent=10000000000)",
        "10 ** 400",
        "9223372036854775807 + 1",
        "-9223372036854775807 - 2",
        "9223372036854775807 * 9223372036854775807",
        "170141183460469231731687303715884105728",
        "(0 - 9223372036854775807 - 1) // -1",
        "(0 - 9223372036854775807 - 1) % -1 + 'a'",
        "1 % 0",
        "1 / 0",
        "1.0 // 0",
        "'a'.expandtabs(1000000000)",
        "'abc'[::0]",
        "range(1, 2, 0)",
        "lipsum(100000)",
        "cycler(1).next()",
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__.__globals__",
        "[].append(1)",
        "messages[0].update({'a': 1})",
        "'a'.split('')",
        "'a'.partition('')",
        "[nan, 1] | sort",
        "['a', 1] | sort",
    ] {
        add(expression, format!("{{{{ {expression} }}}}"));
    }
    // Time.
    for (name, source) in [
        ("nested loops", "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"),
        (
            "nested loops with a filter",
            "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
        ),
        ("a macro that calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        (
            "macros that call each other",
            "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        ),
        (
            "a macro that calls itself twice",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        ),
        (
            "a caller that calls itself",
            "{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
        ),
        ("defaults that call", "{% macro m(x=m()) %}{% endmacro %}{{ m() }}"),
        (
            "a recursive loop",
            "{% set ns = namespace() %}{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        ),
        ("a recursive loop that grows", "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}"),
        ("sorting", "{% for i in range(99999) %}{% set x = range(9999) | sort %}{% endfor %}"),
        ("unique", "{{ range(999999) | unique | list | length }}"),
        (
            "a dict of many",
            "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = dict(ns.x, **{i ~ '': i}) %}{% endfor %}",
        ),
        ("in", "{% set x = range(99999) | list %}{% for i in x %}{% if i in x %}{% endif %}{% endfor %}"),
        (
            "lengths",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x | length %}{% endfor %}",
        ),
        (
            "counts",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x.count('aa') %}{% endfor %}",
        ),
        (
            "finds",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x.find('ab') %}{% endfor %}",
        ),
        (
            "parts of a text",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x[1:] %}{% endfor %}",
        ),
        (
            "items of a text",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x[-1] %}{% endfor %}",
        ),
        (
            "cases",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x.isupper() %}{% endfor %}",
        ),
        (
            "tests of cases",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x is upper %}{% endfor %}",
        ),
        (
            "strips",
            "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x.strip(x) %}{% endfor %}",
        ),
        (
            "comparisons",
            "{% set x = 'a' * 1000000 %}{% set z = 'a' * 1000000 %}{% for i in range(999999) %}{% set y = x < z %}{% endfor %}",
        ),
        (
            "numbers",
            "{% set x = '1' * 1000000 %}{% for i in range(999999) %}{% set y = x | int %}{% endfor %}",
        ),
        (
            "words",
            "{% set x = 'a ' * 1000000 %}{% for i in range(999999) %}{% set y = x | wordcount %}{% endfor %}",
        ),
        ("map", "{{ range(9999999) | map('string') | map('upper') | map('lower') | list | length }}"),
        ("output", "{% set x = 'a' * 1000000 %}{% for i in range(999999) %}{{ x }}{% endfor %}"),
        ("raw output", "{% for i in range(999999999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}"),
        (
            "dictionary keys",
            "{% set x = dict(a=1) %}{% for i in range(99999999) %}{% set y = x['a' ~ i] %}{% endfor %}",
        ),
        (
            "namespace names",
            "{% set ns = namespace() %}{% for i in range(99999999) %}{% set ns.a = i %}{% endfor %}",
        ),
    ] {
        add(name, source.into());
    }
    // What there is not.
    for source in [
        "{% include 'chat' %}",
        "{% import 'chat' as c %}",
        "{% from 'chat' import x %}",
        "{% extends 'chat' %}",
        "{% block x %}{% endblock %}{{ self.x() }}",
        "{% autoescape true %}{% endautoescape %}",
        "{% break %}",
        "{% set x.y = 1 %}",
        "{% set messages.x = 1 %}",
        "{{ caller() }}",
        "{{ loop(1) }}",
        "{{ super() }}",
        "{{ raise_exception('\u{1b}[2J\u{7}\nred') }}",
        "{{ raise_exception('x' * 1000000) }}",
    ] {
        add(source, source.into());
    }
    all
}

/// Whether an error is one sentence that cannot control a terminal.
fn is_sentence(said: &str) -> bool {
    said.len() < 3000 && !said.contains(char::is_control) && said.contains("a stranger")
}

#[test]
fn templates_end_with_a_sentence() {
    let mut attacks = Attacks::new("chat templates");
    let now = date(2026, 3, 7).at(9, 5, 0, 0);
    for (name, source) in templates() {
        attacks.attack(&name, || -> Result<(), String> {
            let began = Instant::now();
            let ended = super::ends(move || {
                let messages = [ChatMessage::new("user", "Hi"), ChatMessage::new("assistant", "Ho")];
                ChatTemplate::new(&source, "a stranger", BTreeMap::new())?.render(&messages, now)
            })?;
            match ended.map(|script| script.to_string()) {
                Err(error) if is_sentence(&format!("{error:#}")) => {}
                Err(error) => return Err(format!("says {error:#}")),
                Ok(text) => {
                    return Err(format!(
                        "writes {} bytes: {:?}",
                        text.len(),
                        text.chars().take(50).collect::<String>()
                    ));
                }
            }
            let took = began.elapsed();
            if took < Duration::from_secs(60) { Ok(()) } else { Err(format!("takes {took:?}")) }
        });
    }
    attacks.assert();
}

#[test]
fn long_templates_end_with_a_text_or_a_sentence() {
    let mut attacks = Attacks::new("long templates");
    for part in [
        "{{",
        "{%",
        "{#",
        "}}",
        "%}",
        "#}",
        "{{-",
        "{%-",
        "{% raw %}",
        "{% endraw %}",
        "{% raw %}{% endraw %}",
        "{# #}",
        "'",
        "\"",
        "{{ '",
        "{{ 'a\\",
        "\n",
        "\r\n",
        "{{ 1 }}",
        "{{ x }}",
        "{{ 'a' }}\n",
        "{% set x = 1 %}",
        "{% if 1 %}",
        "{% if 1 %}{% endif %}",
        "é",
        " ",
        "{% for i in [1] %}{% endfor %}",
        "{% macro m() %}{% endmacro %}",
        "{% generation %}",
        "{% endgeneration %}",
        "{{ (",
        "{{ [[",
        "{",
        "%",
        "{% raw",
        "{%- raw -%}",
        "{% set x %}",
        "{{ m() }}",
        "{{ 1e9",
        "{{ 0x",
        "{{ 99999999999999999999999999999999999999999 }}",
        "\0",
        "\u{feff}",
    ] {
        for size in [100_000, 1 << 20] {
            attacks.attack(format!("{size} bytes of {part:?}"), || -> Result<(), String> {
                let source = part.repeat(size / part.len());
                let now = date(2026, 3, 7).at(9, 5, 0, 0);
                let ended = super::ends(move || {
                    ChatTemplate::new(&source, "a stranger", BTreeMap::new())?.render(&[], now)
                })?;
                match ended {
                    Err(error) if !is_sentence(&format!("{error:#}")) => Err(format!("says {error:#}")),
                    _ => Ok(()),
                }
            });
        }
    }
    attacks.assert();
}

#[test]
fn templates_that_end_leave_the_process_as_it_was() {
    let mut attacks = Attacks::new("a process that renders templates");
    attacks.attack("many at once, and a good one after them", || -> Result<(), String> {
        let now = date(2026, 3, 7).at(9, 5, 0, 0);
        let render = move |source: &str| {
            ChatTemplate::new(source, "a stranger", BTreeMap::new())?
                .render(&[ChatMessage::new("user", "Hi")], now)
        };
        let bad = doubled(60, "{{ ns.x == ns.x }}{{ ns.x }}");
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let bad = bad.clone();
                std::thread::spawn(move || (0..20).all(|_| render(&bad).is_err()))
            })
            .collect();
        let all = threads.into_iter().all(|thread| thread.join().unwrap_or(false));
        let good = render("{{ messages[0].content }}").map_err(|error| error.to_string())?;
        if all && good == "Hi" { Ok(()) } else { Err(format!("{all} {good}")) }
    });
    attacks.assert();
}

#[test]
fn the_program_ends_with_status_2() {
    let mut attacks = Attacks::new("lm with templates");
    let folder = tempfile::tempdir().unwrap();
    crate::lm::chat::write(folder.path(), "x");
    for source in [
        doubled(60, "{{ ns.x | tojson }}"),
        format!("{{{{ {}x }}}}", "not ".repeat(100_000)),
        "{{ '{:>1000000000}'.format(1) }}".into(),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into(),
        "{{ raise_exception('no \u{1b}[31m') }}".into(),
    ] {
        let name: String = source.chars().take(60).collect();
        attacks.attack(name, || -> Result<(), String> {
            fs::write(folder.path().join("chat_template.jinja"), &source)
                .map_err(|error| error.to_string())?;
            for more in [&["--prompt", "Hi"][..], &["--tp", "2"], &["--prompt", "Hi", "--tp", "2"]] {
                let mut command = Command::new(env!("CARGO_BIN_EXE_lm"));
                command.args(["generate", "--chat", "--model"]).arg(folder.path()).args(more);
                let mut child = command
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .map_err(|error| error.to_string())?;
                std::io::Write::write_all(&mut child.stdin.take().ok_or("no stdin")?, b"Hi\n").ok();
                let output = super::ends(|| child.wait_with_output())?.map_err(|error| error.to_string())?;
                let said = String::from_utf8_lossy(&output.stderr);
                if output.status.code() != Some(2) || said.lines().count() != 1 || said.contains('\u{1b}') {
                    return Err(format!("{more:?}: {} {said}", output.status));
                }
            }
            Ok(())
        });
    }
    attacks.assert();
}
