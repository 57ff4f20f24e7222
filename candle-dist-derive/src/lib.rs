//! The derive macro of `TensorTree`, which [candle-dist](https://docs.rs/candle-dist) re-exports.
use proc_macro2::{TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::{
    Attribute, Data, DeriveInput, Error, Field, Fields, Ident, Index, Member, Result, parse_macro_input,
    parse_quote,
};

/// Implements `TensorTree` for a struct or an enum. Its tensors are those of its fields, in the order of declaration.
///
/// A field with `#[tensor_tree(keep)]` is cloned and need not be a tree. Type parameters of other fields must be trees.
#[proc_macro_derive(TensorTree, attributes(tensor_tree))]
pub fn derive_tensor_tree(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(input).unwrap_or_else(Error::into_compile_error).into()
}

/// A field of a struct or of a variant.
struct Part {
    /// Its name, or its index.
    member: Member,
    /// The name of the variable that binds it.
    at_hand: Ident,
    is_kept: bool,
    field: Field,
}

fn expand(mut input: DeriveInput) -> Result<TokenStream> {
    let name = input.ident.clone();
    refuse_keep(&input.attrs)?;
    let shapes: Vec<(TokenStream, Vec<Part>)> = match &input.data {
        Data::Struct(data) => vec![(quote!(Self), parts(&data.fields)?)],
        Data::Enum(data) => {
            let variant = |variant: &syn::Variant| {
                refuse_keep(&variant.attrs)?;
                let name = &variant.ident;
                Ok((quote!(Self::#name), parts(&variant.fields)?))
            };
            data.variants.iter().map(variant).collect::<Result<_>>()?
        }
        Data::Union(_) => {
            return Err(Error::new(name.span(), "a union is no TensorTree: nobody knows which field it has"));
        }
    };
    bound(&mut input, shapes.iter().flat_map(|(_, parts)| parts));

    let visits = shapes.iter().map(|(shape, parts)| {
        let trees = parts.iter().filter(|part| !part.is_kept);
        let (members, at_hand): (Vec<_>, Vec<_>) = trees.map(|part| (&part.member, &part.at_hand)).unzip();
        quote! { #shape { #(#members: #at_hand,)* .. } => { #(::candle_dist::TensorTree::visit(#at_hand, __f);)* } }
    });
    let rebuilds = shapes.iter().map(|(shape, parts)| {
        let members: Vec<_> = parts.iter().map(|part| &part.member).collect();
        let at_hand: Vec<_> = parts.iter().map(|part| &part.at_hand).collect();
        let made = parts.iter().map(|Part { at_hand, is_kept, .. }| match is_kept {
            true => quote!(::core::clone::Clone::clone(#at_hand)),
            false => quote!(::candle_dist::TensorTree::rebuild(#at_hand, __f)?),
        });
        quote! { #shape { #(#members: #at_hand,)* } => #shape { #(#members: #made,)* } }
    });
    // An enum without variants has no values, and a reference to it cannot be matched.
    let (visit, rebuild) = match shapes.is_empty() {
        true => (quote!(match *self {}), quote!(match *self {})),
        false => (
            quote!(match self { #(#visits)* }),
            quote!(::core::result::Result::Ok(match self { #(#rebuilds,)* })),
        ),
    };
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics ::candle_dist::TensorTree for #name #type_generics #where_clause {
            #[allow(unused_variables)]
            fn visit<'__tree>(&'__tree self, __f: &mut dyn ::core::ops::FnMut(&'__tree ::candle_dist::candle_core::Tensor)) {
                #visit
            }

            #[allow(unused_variables)]
            fn rebuild<__E: ::core::convert::From<::candle_dist::Error>>(
                &self,
                __f: &mut dyn ::core::ops::FnMut(
                    &::candle_dist::candle_core::Tensor,
                ) -> ::core::result::Result<::candle_dist::candle_core::Tensor, __E>,
            ) -> ::core::result::Result<Self, __E> {
                #rebuild
            }
        }
    })
}

fn parts(fields: &Fields) -> Result<Vec<Part>> {
    let part = |(place, field): (usize, &Field)| {
        let member = match &field.ident {
            Some(name) => Member::Named(name.clone()),
            None => Member::Unnamed(Index::from(place)),
        };
        Ok(Part {
            member,
            at_hand: format_ident!("__field_{place}"),
            is_kept: is_kept(field)?,
            field: field.clone(),
        })
    };
    fields.iter().enumerate().map(part).collect()
}

/// Returns an error if the attribute is not on a field, where it would be ignored.
fn refuse_keep(attributes: &[Attribute]) -> Result<()> {
    match attributes.iter().find(|attribute| attribute.path().is_ident("tensor_tree")) {
        Some(attribute) => {
            Err(Error::new_spanned(attribute, "keep belongs to a field; mark each field that is kept"))
        }
        None => Ok(()),
    }
}

/// Returns whether a field has `#[tensor_tree(keep)]`. Anything else in the attribute is an error.
fn is_kept(field: &Field) -> Result<bool> {
    let mut is_kept = false;
    for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("tensor_tree")) {
        let mut says = false;
        attribute.parse_nested_meta(|meta| {
            says = meta.path.is_ident("keep");
            if says { Ok(()) } else { Err(meta.error("expected keep")) }
        })?;
        if !says {
            return Err(Error::new_spanned(attribute, "the attribute is empty; expected keep"));
        }
        is_kept = true;
    }
    Ok(is_kept)
}

/// Adds the bounds that fields need to each type parameter: `TensorTree`, or `Clone` if all its fields are kept.
fn bound<'a>(input: &mut DeriveInput, parts: impl Iterator<Item = &'a Part>) {
    let parts: Vec<&Part> = parts.collect();
    for parameter in input.generics.type_params_mut() {
        let name = parameter.ident.clone();
        let of = |is_kept: bool| {
            parts.iter().any(|part| {
                let field_type = &part.field.ty;
                part.is_kept == is_kept && mentions(quote!(#field_type), &name)
            })
        };
        if of(false) {
            parameter.bounds.push(parse_quote!(::candle_dist::TensorTree));
        }
        if of(true) {
            parameter.bounds.push(parse_quote!(::core::clone::Clone));
        }
    }
}

fn mentions(tokens: TokenStream, name: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Group(group) => mentions(group.stream(), name),
        _ => false,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn a_keep_that_is_not_at_a_field_is_an_error() {
        let misplaced: [DeriveInput; 3] = [
            parse_quote!(
                #[tensor_tree(keep)]
                struct Whole {
                    x: Tensor,
                }
            ),
            parse_quote!(
                enum Variant {
                    #[tensor_tree(keep)]
                    Kept(Tensor),
                    Other,
                }
            ),
            parse_quote!(
                #[tensor_tree(keep)]
                enum Whole {
                    One(Tensor),
                }
            ),
        ];
        for input in misplaced {
            let error = expand(input).unwrap_err().to_string();
            assert!(error.contains("belongs to a field"), "{error}");
        }
        let empty: DeriveInput = parse_quote!(
            struct Empty {
                #[tensor_tree()]
                x: Tensor,
            }
        );
        assert!(expand(empty).is_err());
        let good: DeriveInput = parse_quote!(
            struct Good {
                #[tensor_tree(keep)]
                x: NoTree,
            }
        );
        assert!(expand(good).is_ok());
    }
}
