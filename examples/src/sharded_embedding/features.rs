//! The features of an impression.

use candle_shard::kernels::BagMode;

/// A categorical feature, with its own table.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    /// The name.
    pub name: &'static str,
    /// The number of distinct values, which is the number of rows of the table.
    pub vocab: usize,
    /// `None` if each sample has one value.
    pub bag: Option<Bag>,
    /// The norm to which longer rows are scaled before they are looked up.
    pub max_norm: Option<f64>,
}

/// Several values per sample, from none to `most`.
#[derive(Clone, Copy, Debug)]
pub struct Bag {
    /// The most values.
    pub most: usize,
    /// The reduction of their rows.
    pub mode: BagMode,
    /// Whether each value has a weight.
    pub weighted: bool,
}

/// All categorical features.
pub const FEATURES: [Feature; 5] = [
    Feature { name: "country", vocab: 100, bag: None, max_norm: None },
    Feature { name: "publisher", vocab: 5_000, bag: None, max_norm: Some(0.5) },
    Feature { name: "ad", vocab: 200_000, bag: None, max_norm: None },
    Feature {
        name: "visited pages",
        vocab: 50_000,
        bag: Some(Bag { most: 8, mode: BagMode::Mean, weighted: false }),
        max_norm: None,
    },
    Feature {
        name: "search terms",
        vocab: 20_000,
        bag: Some(Bag { most: 6, mode: BagMode::Sum, weighted: true }),
        max_norm: None,
    },
];

/// The number of dense features, such as the age of the account.
pub const DENSE: usize = 4;

impl Feature {
    /// Describes the feature in a few words.
    pub fn kind(&self) -> String {
        let limit = self.max_norm.map_or(String::new(), |max_norm| format!(", max_norm {max_norm}"));
        match self.bag {
            None => format!("one a sample{limit}"),
            Some(Bag { most, mode, weighted }) => {
                let weighted = if weighted { "weighted " } else { "" };
                format!("bags of 0 to {most}, {weighted}{}{limit}", format!("{mode:?}").to_lowercase())
            }
        }
    }
}
