//! The values of expressions.

use minijinja::machinery::ast::{BinOpKind, CompareOpKind, Expr, UnaryOpKind};
use minijinja::value::{Value as Constant, ValueKind};

use super::eval::Renderer;
use super::filters;
use super::ops;
use super::value::JinjaValue;
use super::work::{EvalResult, WorkBudget, fail};

impl<'a> Renderer<'a> {
    /// Returns the value of an expression.
    pub(super) fn expression(&mut self, expression: &'a Expr<'a>) -> EvalResult<JinjaValue> {
        self.work.step()?;
        self.work.nest()?;
        let made = self.expression_inside(expression);
        self.work.unnest();
        made
    }

    fn expression_inside(&mut self, expression: &'a Expr<'a>) -> EvalResult<JinjaValue> {
        let work = self.work;
        Ok(match expression {
            Expr::Var(name) => self.variable(name.id)?,
            Expr::Const(constant) => literal(&constant.value, work)?,
            Expr::List(list) => {
                let items = self.all(&list.items)?;
                work.list(items)?
            }
            Expr::Tuple(tuple) => {
                let items = self.all(&tuple.items)?;
                work.tuple(items)?
            }
            Expr::Map(map) => {
                let (keys, values) = (self.all(&map.keys)?, self.all(&map.values)?);
                filters::dict(keys.into_iter().zip(values), work)?
            }
            Expr::UnaryOp(op) => {
                let value = self.expression(&op.expr)?;
                match op.op {
                    UnaryOpKind::Not => JinjaValue::Bool(!value.is_true()),
                    UnaryOpKind::Neg => ops::binary(BinOpKind::Sub, &JinjaValue::Int(0), &value, work)?,
                }
            }
            Expr::BinOp(op) => {
                let left = self.expression(&op.left)?;
                match op.op {
                    BinOpKind::ScAnd if !left.is_true() => left,
                    BinOpKind::ScOr if left.is_true() => left,
                    kind => {
                        let right = self.expression(&op.right)?;
                        ops::binary(kind, &left, &right, work)?
                    }
                }
            }
            Expr::Compare(chain) => {
                let mut left = self.expression(&chain.expr)?;
                for one in &chain.ops {
                    let right = self.expression(&one.expr)?;
                    let (kind, want) = match one.op {
                        CompareOpKind::Eq => (BinOpKind::Eq, true),
                        CompareOpKind::Ne => (BinOpKind::Ne, true),
                        CompareOpKind::Lt => (BinOpKind::Lt, true),
                        CompareOpKind::Lte => (BinOpKind::Lte, true),
                        CompareOpKind::Gt => (BinOpKind::Gt, true),
                        CompareOpKind::Gte => (BinOpKind::Gte, true),
                        CompareOpKind::In => (BinOpKind::In, true),
                        CompareOpKind::NotIn => (BinOpKind::In, false),
                    };
                    if ops::binary(kind, &left, &right, work)?.is_true() != want {
                        return Ok(JinjaValue::Bool(false));
                    }
                    left = right;
                }
                JinjaValue::Bool(true)
            }
            Expr::IfExpr(cond) => {
                if self.expression(&cond.test_expr)?.is_true() {
                    self.expression(&cond.true_expr)?
                } else {
                    match &cond.false_expr {
                        Some(other) => self.expression(other)?,
                        None => JinjaValue::undefined("the value without an else"),
                    }
                }
            }
            Expr::Filter(filter) => {
                let Some(value) = &filter.expr else { return fail("a filter without a value") };
                let value = self.expression(value)?;
                let args = self.args(&filter.args)?;
                self.filter(filter.name, value, args)?
            }
            Expr::Test(test) => {
                let value = self.expression(&test.expr)?;
                let args = self.args(&test.args)?;
                JinjaValue::Bool(self.test(test.name, &value, args)?)
            }
            Expr::GetAttr(attribute) => {
                let value = self.expression(&attribute.expr)?;
                ops::attribute(&value, attribute.name, work)?
            }
            Expr::GetItem(item) => {
                let value = self.expression(&item.expr)?;
                let key = self.expression(&item.subscript_expr)?;
                ops::item(&value, &key, work)?
            }
            Expr::Slice(slice) => {
                let value = self.expression(&slice.expr)?;
                let mut bound = |bound: &'a Option<Expr<'a>>| match bound {
                    Some(bound) => self.expression(bound),
                    None => Ok(JinjaValue::None),
                };
                let bounds = [bound(&slice.start)?, bound(&slice.stop)?, bound(&slice.step)?];
                ops::slice(&value, bounds, work)?
            }
            Expr::Call(call) => {
                let args = self.args(&call.args)?;
                self.called(call, args)?
            }
        })
    }

    fn all(&mut self, expressions: &'a [Expr<'a>]) -> EvalResult<Vec<JinjaValue>> {
        expressions.iter().map(|one| self.expression(one)).collect()
    }

    /// Applies the filters of a block to what it writes.
    pub(super) fn filtered(&mut self, filter: &'a Expr<'a>, value: JinjaValue) -> EvalResult<JinjaValue> {
        self.work.nest()?;
        let Expr::Filter(filter) = filter else { return fail("a block without a filter") };
        let value = match &filter.expr {
            Some(inner) => self.filtered(inner, value)?,
            None => value,
        };
        let args = self.args(&filter.args)?;
        let made = self.filter(filter.name, value, args)?;
        self.work.unnest();
        Ok(made)
    }
}

/// A constant of the template.
fn literal(constant: &Constant, work: &WorkBudget) -> EvalResult<JinjaValue> {
    Ok(match constant.kind() {
        ValueKind::None => JinjaValue::None,
        ValueKind::Bool => JinjaValue::Bool(constant.is_true()),
        ValueKind::Number if constant.is_integer() => match constant.as_i64() {
            Some(number) => JinjaValue::Int(number),
            None => return fail("too large a number"),
        },
        ValueKind::Number => JinjaValue::Float(f64::try_from(constant.clone()).unwrap_or(f64::NAN)),
        _ => work.own(constant.as_str().unwrap_or_default())?,
    })
}
