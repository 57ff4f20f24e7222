//! Runs the statements of a template.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use jiff::civil::DateTime;
use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Stmt};

use super::args::Args;
use super::text::Text;
use super::value::{JinjaValue, Loop};
use super::work::{EvalResult, WorkBudget, fail};
use super::{MARK, TemplateOutput, checks, filters, functions};

/// What runs after a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum NextStep {
    Statement,
    Round,
    Loop,
}

/// Variables, and where to look for others.
struct VariableScope<'a> {
    variables: BTreeMap<&'a str, JinjaValue>,
    outer: Option<usize>,
}

/// A macro or a recursive loop, and the scope that it is in.
struct Callable<'a, T> {
    what: &'a T,
    scope: usize,
}

/// One rendering.
pub(super) struct Renderer<'a> {
    pub(super) work: &'a WorkBudget,
    pub(super) now: DateTime,
    out: Text,
    /// The bytes of `out` inside of `{% generation %}`.
    marks: Vec<Range<usize>>,
    /// How many texts that are not written yet are around the statement that runs.
    captures: usize,
    /// Whether there was a mark in such a text.
    has_lost_marks: bool,
    scopes: Vec<VariableScope<'a>>,
    /// The scope of the statement that runs.
    current: usize,
    /// Scopes before this one stay, since a macro may look into them.
    kept: usize,
    macros: Vec<Callable<'a, Macro<'a>>>,
    recursions: Vec<Callable<'a, ForLoop<'a>>>,
}

impl<'a> Renderer<'a> {
    pub(super) fn new(globals: BTreeMap<&'a str, JinjaValue>, now: DateTime, work: &'a WorkBudget) -> Self {
        Self {
            work,
            now,
            out: Text::default(),
            marks: Vec::new(),
            captures: 0,
            has_lost_marks: false,
            scopes: vec![VariableScope { variables: globals, outer: None }],
            current: 0,
            kept: 1,
            macros: Vec::new(),
            recursions: Vec::new(),
        }
    }

    /// Runs the whole template and returns what it writes.
    pub(super) fn run(mut self, template: &'a Stmt<'a>) -> EvalResult<TemplateOutput> {
        self.statement(template)?;
        Ok(TemplateOutput { text: self.out, marks: (!self.has_lost_marks).then_some(self.marks) })
    }

    /// Runs what the template marks as written by the model.
    fn marked(&mut self, statements: &'a [Stmt<'a>]) -> EvalResult<NextStep> {
        let start = self.out.len();
        let next = self.block(statements)?;
        self.work.charge(size_of::<Range<usize>>() as u64)?;
        match self.captures {
            0 => self.marks.push(start..self.out.len()),
            _ => self.has_lost_marks = true,
        }
        Ok(next)
    }

    /// Runs `f` with a scope of its own.
    fn scoped<T>(&mut self, outer: usize, f: impl FnOnce(&mut Self) -> EvalResult<T>) -> EvalResult<T> {
        let (before, place) = (self.current, self.scopes.len());
        self.work.step()?;
        self.scopes.push(VariableScope { variables: BTreeMap::new(), outer: Some(outer) });
        self.current = place;
        let made = f(self)?;
        self.current = before;
        self.scopes.truncate(place.max(self.kept));
        Ok(made)
    }

    /// Runs `f` and returns what it writes.
    fn captured(&mut self, f: impl FnOnce(&mut Self) -> EvalResult<NextStep>) -> EvalResult<Text> {
        let before = std::mem::take(&mut self.out);
        self.captures += 1;
        f(self)?;
        self.captures -= 1;
        Ok(std::mem::replace(&mut self.out, before))
    }

    pub(super) fn variable(&self, name: &str) -> EvalResult<JinjaValue> {
        let mut at = Some(self.current);
        while let Some(scope) = at.and_then(|at| self.scopes.get(at)) {
            self.work.charge(8u64)?;
            if let Some(value) = scope.variables.get(name) {
                return Ok(value.clone());
            }
            at = scope.outer;
        }
        Ok(functions::named(name).map_or_else(|| JinjaValue::undefined(name), JinjaValue::Function))
    }

    fn set(&mut self, name: &'a str, value: JinjaValue) {
        let current = self.current;
        self.scopes[current].variables.insert(name, value);
    }

    fn assign(&mut self, target: &'a Expr<'a>, value: JinjaValue) -> EvalResult<()> {
        self.work.step()?;
        match target {
            Expr::Var(name) => self.set(name.id, value),
            Expr::GetAttr(attribute) => {
                let JinjaValue::Namespace(named) = self.expression(&attribute.expr)? else {
                    return fail(format!("only a namespace has a {} that can be set", attribute.name));
                };
                self.work.storable(&value)?;
                let mut named = named.borrow_mut();
                self.work.charge(named.len() as u64 * 4)?;
                match named.iter_mut().find(|(known, _)| known == attribute.name) {
                    Some((_, old)) => *old = value,
                    None => named.push((attribute.name.into(), value)),
                }
            }
            Expr::List(targets) => {
                let values = value.items(self.work)?;
                if values.len() != targets.items.len() {
                    return fail(format!("{} values for {} names", values.len(), targets.items.len()));
                }
                for (target, value) in targets.items.iter().zip(values) {
                    self.assign(target, value)?;
                }
            }
            other => return fail(format!("{} cannot be set", other.description())),
        }
        Ok(())
    }

    pub(super) fn write(&mut self, text: &Text) -> EvalResult<()> {
        self.work.charge(text.cost())?;
        self.out.push(text);
        Ok(())
    }

    fn block(&mut self, statements: &'a [Stmt<'a>]) -> EvalResult<NextStep> {
        for statement in statements {
            let next = self.statement(statement)?;
            if next != NextStep::Statement {
                return Ok(next);
            }
        }
        Ok(NextStep::Statement)
    }

    /// Runs a statement; errors have its line.
    fn statement(&mut self, statement: &'a Stmt<'a>) -> EvalResult<NextStep> {
        self.work.step()?;
        self.work.nest()?;
        let ran = self.statement_inside(statement);
        self.work.unnest();
        ran.map_err(|mut fail| {
            fail.line = fail.line.or_else(|| line(statement));
            fail
        })
    }

    fn statement_inside(&mut self, statement: &'a Stmt<'a>) -> EvalResult<NextStep> {
        match statement {
            Stmt::Template(template) => return self.block(&template.children),
            Stmt::EmitRaw(raw) => {
                self.work.charge(raw.raw.len() as u64)?;
                self.out.push_own(raw.raw);
            }
            Stmt::EmitExpr(emitted) => {
                let text = self.expression(&emitted.expr)?.shown(self.work)?;
                self.write(&text)?;
            }
            Stmt::IfCond(cond) if is_mark(&cond.expr) => return self.marked(&cond.true_body),
            Stmt::IfCond(cond) => {
                let holds = self.expression(&cond.expr)?.is_true();
                return self.block(if holds { &cond.true_body } else { &cond.false_body });
            }
            Stmt::ForLoop(one) => {
                let items = self.expression(&one.iter)?.items(self.work)?;
                let recursion = one.recursive.then(|| {
                    self.recursions.push(Callable { what: &**one, scope: self.current });
                    self.recursions.len() - 1
                });
                self.each(one, items, recursion, 1)?;
            }
            Stmt::WithBlock(with) => {
                let outer = self.current;
                return self.scoped(outer, |renderer| {
                    for (target, value) in &with.assignments {
                        let value = renderer.expression(value)?;
                        renderer.assign(target, value)?;
                    }
                    renderer.block(&with.body)
                });
            }
            Stmt::Set(set) => {
                let value = self.expression(&set.expr)?;
                self.assign(&set.target, value)?;
            }
            Stmt::SetBlock(set) => {
                let outer = self.current;
                let text =
                    self.captured(|renderer| renderer.scoped(outer, |renderer| renderer.block(&set.body)))?;
                let mut value = self.work.text(text)?;
                if let Some(filter) = &set.filter {
                    value = self.filtered(filter, value)?;
                }
                self.assign(&set.target, value)?;
            }
            Stmt::FilterBlock(block) => {
                let outer = self.current;
                let text =
                    self.captured(|renderer| renderer.scoped(outer, |renderer| renderer.block(&block.body)))?;
                let value = self.work.text(text)?;
                let text = self.filtered(&block.filter, value)?.shown(self.work)?;
                self.write(&text)?;
            }
            Stmt::AutoEscape(block) => {
                if self.expression(&block.enabled)?.is_true() {
                    return fail("chat templates are not escaped");
                }
                return self.block(&block.body);
            }
            Stmt::Macro(declared) => {
                let value = self.declare(declared);
                self.set(declared.name, value);
            }
            Stmt::CallBlock(block) => {
                let caller = self.declare(&block.macro_decl);
                let mut args = self.args(&block.call.args)?;
                args.named.push(("caller".into(), caller));
                let text = self.called(&block.call, args)?.shown(self.work)?;
                self.write(&text)?;
            }
            Stmt::Continue(_) => return Ok(NextStep::Round),
            Stmt::Break(_) => return Ok(NextStep::Loop),
            Stmt::Do(once) => {
                let args = self.args(&once.call.args)?;
                self.called(&once.call, args)?;
            }
        }
        Ok(NextStep::Statement)
    }

    fn declare(&mut self, declared: &'a Macro<'a>) -> JinjaValue {
        self.kept = self.kept.max(self.scopes.len());
        self.macros.push(Callable { what: declared, scope: self.current });
        JinjaValue::Macro(self.macros.len() - 1)
    }

    /// Runs a loop over items.
    fn each(
        &mut self,
        one: &'a ForLoop<'a>,
        items: Vec<JinjaValue>,
        recursion: Option<usize>,
        depth: usize,
    ) -> EvalResult<()> {
        let outer = self.current;
        let mut chosen = Vec::new();
        match &one.filter_expr {
            None => chosen = items,
            Some(filter) => {
                for item in items {
                    let holds = self.scoped(outer, |renderer| {
                        renderer.assign(&one.target, item.clone())?;
                        renderer.expression(filter)
                    })?;
                    if holds.is_true() {
                        chosen.push(item);
                    }
                }
            }
        }
        let count = chosen.len();
        if count == 0 {
            // A loop control of the other body is one of the loop around this one, and there is none in Jinja.
            return self.scoped(outer, |renderer| renderer.block(&one.else_body)).map(drop);
        }
        self.work.charge(count as u64 * 16)?;
        let state =
            Rc::new(Loop { items: chosen, index: Cell::new(0), recursion, depth, seen: RefCell::new(None) });
        self.scoped(outer, |renderer| {
            let scope = renderer.current;
            for index in 0..count {
                renderer.work.step()?;
                state.index.set(index);
                let item = state.items[index].clone();
                renderer.scopes[scope].variables.clear();
                renderer.set("loop", JinjaValue::Loop(state.clone()));
                renderer.assign(&one.target, item)?;
                if renderer.block(&one.body)? == NextStep::Loop {
                    break;
                }
            }
            Ok(())
        })
    }

    /// `loop(items)` inside of a recursive loop.
    pub(super) fn again(&mut self, of: &Loop, args: Args) -> EvalResult<JinjaValue> {
        let Some(recursion) = of.recursion else { return fail("the loop is not recursive") };
        let items = args.one("loop")?.items(self.work)?;
        let Callable { what, scope } = self.recursions[recursion];
        let before = std::mem::replace(&mut self.current, scope);
        let text = self.captured(|renderer| {
            renderer.each(what, items, Some(recursion), of.depth + 1).map(|()| NextStep::Statement)
        })?;
        self.current = before;
        self.work.text(text)
    }

    /// Calls a macro.
    pub(super) fn macro_call(&mut self, number: usize, args: Args) -> EvalResult<JinjaValue> {
        let Callable { what, scope } = self.macros[number];
        let text = self.captured(|renderer| {
            renderer.scoped(scope, |renderer| {
                renderer.bind(what, args)?;
                renderer.block(&what.body)
            })
        })?;
        self.work.text(text)
    }

    /// Sets the parameters of a macro.
    fn bind(&mut self, of: &'a Macro<'a>, args: Args) -> EvalResult<()> {
        let Args { positional, mut named } = args;
        let mut positional = positional.into_iter();
        let without = of.args.len() - of.defaults.len();
        for (place, parameter) in of.args.iter().enumerate() {
            let Expr::Var(name) = parameter else { return fail("a macro has a parameter without a name") };
            let given = named.iter().position(|(known, _)| known == name.id).map(|at| named.remove(at).1);
            let value = match (positional.next().or(given), place.checked_sub(without)) {
                (Some(value), _) => value,
                (None, Some(at)) => self.expression(&of.defaults[at])?,
                (None, None) => JinjaValue::undefined(name.id),
            };
            self.set(name.id, value);
        }
        if let Some(at) = named.iter().position(|(known, _)| known == "caller") {
            self.set("caller", named.remove(at).1);
        }
        let rest = self.work.tuple(positional.collect())?;
        self.set("varargs", rest);
        let named = named.into_iter().map(|(name, value)| Ok((self.work.own(name)?, value)));
        let named = named.collect::<EvalResult<Vec<_>>>()?;
        let named = filters::dict(named, self.work)?;
        self.set("kwargs", named);
        Ok(())
    }

    pub(super) fn filter(&mut self, name: &str, value: JinjaValue, args: Args) -> EvalResult<JinjaValue> {
        self.work.step()?;
        filters::apply(self, name, value, args)
    }

    pub(super) fn test(&mut self, name: &str, value: &JinjaValue, args: Args) -> EvalResult<bool> {
        self.work.step()?;
        checks::is(name, value, args, self.work)
    }

    /// Returns the arguments of a call.
    pub(super) fn args(&mut self, args: &'a [CallArg<'a>]) -> EvalResult<Args> {
        let mut made = Args::default();
        for arg in args {
            match arg {
                CallArg::Pos(value) => made.positional.push(self.expression(value)?),
                CallArg::Kwarg(name, value) => made.named.push(((*name).into(), self.expression(value)?)),
                CallArg::PosSplat(values) => {
                    made.positional.extend(self.expression(values)?.items(self.work)?);
                }
                CallArg::KwargSplat(values) => {
                    let JinjaValue::Map(map) = self.expression(values)? else {
                        return fail("** takes a dict");
                    };
                    for (name, value) in &map.entries {
                        self.work.charge(name.size() + 16)?;
                        // It would come back as a word of the template.
                        if name.string()?.is_foreign() {
                            return fail("** takes names that the template writes");
                        }
                        made.named.push((name.string()?.to_string(), value.clone()));
                    }
                }
            }
        }
        Ok(made)
    }

    /// Calls what a call names.
    pub(super) fn called(&mut self, call: &'a Call<'a>, args: Args) -> EvalResult<JinjaValue> {
        let callee = match &call.expr {
            Expr::GetAttr(attribute) => {
                let value = self.expression(&attribute.expr)?;
                match &value {
                    JinjaValue::Loop(of) => return functions::of_loop(of, attribute.name, args, self.work),
                    JinjaValue::Namespace(_) | JinjaValue::Map(_) => {
                        match super::ops::attribute(&value, attribute.name, self.work)? {
                            callee @ (JinjaValue::Macro(_) | JinjaValue::Function(_)) => callee,
                            _ => return super::methods::call(&value, attribute.name, args, self.work),
                        }
                    }
                    _ => return super::methods::call(&value, attribute.name, args, self.work),
                }
            }
            other => self.expression(other)?,
        };
        match callee {
            JinjaValue::Macro(number) => self.macro_call(number, args),
            JinjaValue::Function(name) => functions::call(self, name, args),
            JinjaValue::Loop(of) => self.again(&of, args),
            JinjaValue::Undefined(name) => fail(format!("there is no function {name}")),
            other => fail(format!("a {} cannot be called", other.kind())),
        }
    }
}

/// Whether a condition stands for `{% generation %}`.
fn is_mark(condition: &Expr<'_>) -> bool {
    matches!(condition, Expr::Const(constant) if constant.value.as_str() == Some(MARK))
}

/// The line of a statement.
fn line(statement: &Stmt<'_>) -> Option<u16> {
    let span = match statement {
        Stmt::Template(_) => return None,
        Stmt::EmitExpr(one) => one.span(),
        Stmt::EmitRaw(one) => one.span(),
        Stmt::ForLoop(one) => one.span(),
        Stmt::IfCond(one) => one.span(),
        Stmt::WithBlock(one) => one.span(),
        Stmt::Set(one) => one.span(),
        Stmt::SetBlock(one) => one.span(),
        Stmt::AutoEscape(one) => one.span(),
        Stmt::FilterBlock(one) => one.span(),
        Stmt::Macro(one) => one.span(),
        Stmt::CallBlock(one) => one.span(),
        Stmt::Continue(one) => one.span(),
        Stmt::Break(one) => one.span(),
        Stmt::Do(one) => one.span(),
    };
    Some(span.start_line)
}
