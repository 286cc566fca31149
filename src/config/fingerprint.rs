//! Fingerprint of a layer's configuration: the fields that ranks must have alike, in a few numbers that travel with the
//! routing.

use serde_json::Value;

use crate::dtype::DType;
use crate::fnv1a::fnv1a;

use super::{FieldValues, MoeConfig};

/// Fields that have a digest of their own, as paths into a [`MoeConfig`]; the last two are no fields of it. What a dispatch's
/// own fields compare (experts, top-k, expert capacity) is not among them.
const NAMES: [&str; 20] = [
    "hidden",
    "intermediate",
    "router.score",
    "router.logit_bias",
    "router.selection_bias",
    "router.groups",
    "router.renorm",
    "router.scale",
    "router.jitter",
    "activation",
    "weight_at",
    "expert_bias",
    "shared",
    "aux.balance",
    "aux.balance_kind",
    "aux.z",
    "aux.over_ranks",
    "payload",
    TOKENS,
    OVERLAP,
];
/// Those of a [`MoeConfig`].
const FIELDS: usize = NAMES.len() - 2;
const TOKENS: &str = "the tokens' type";
const OVERLAP: &str = "whether products run while rows travel";
/// Bits of a field's digest: two values have the same once in 4096.
const BITS: usize = 12;
const EACH: usize = 64 / BITS;

/// Numbers that differ where the results of two configurations would: one of all fields, by which ranks compare their
/// layers, and a short one of each field, which says where they differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fingerprint {
    whole: u64,
    digests: [u64; Self::WORDS - 1],
    /// The fields' values, for errors.
    values: FieldValues,
}

/// A field in which two configurations differ.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub field: &'static str,
    /// Each one's value, or its digest where the value is not known.
    pub values: [String; 2],
}

impl Fingerprint {
    /// Numbers that it travels as.
    pub(crate) const WORDS: usize = 1 + NAMES.len().div_ceil(EACH);

    /// Of all fields but [`recompute`](MoeConfig::recompute), which is each rank's own choice.
    pub(crate) fn of(config: &MoeConfig) -> Self {
        // Every number is exact in the text.
        let config = serde_json::to_value(MoeConfig { recompute: false, ..config.clone() }).unwrap_or_default();
        let field = |path: &str| path.split('.').try_fold(&config, |value, key| value.get(key)).map(Value::to_string);
        let mut own = Self { whole: hash(&config.to_string()), ..Self::default() };
        // The last are set where they count.
        for (i, name) in NAMES[..FIELDS].iter().enumerate() {
            own.set(i, &field(name).unwrap_or_default());
        }
        own
    }

    /// The same with the type of tokens, where ranks must have that alike too.
    pub(crate) fn with_tokens(mut self, dtype: DType) -> Self {
        self.whole ^= hash(dtype.name());
        self.set(FIELDS, dtype.name());
        self
    }

    /// The same, [with the type of tokens](Self::with_tokens), with what a layer's ranks do while its rows travel.
    pub(crate) fn with_overlap(mut self, overlapped: bool) -> Self {
        let text = if overlapped { "yes" } else { "no" };
        self.whole ^= hash(text);
        self.set(FIELDS + 1, text);
        self
    }

    fn set(&mut self, i: usize, text: &str) {
        let (mask, shift) = ((1 << BITS) - 1, i % EACH * BITS);
        let word = &mut self.digests[i / EACH];
        // The upper bits depend on all of the text.
        *word = *word & !(mask << shift) | (hash(text) >> (64 - BITS)) << shift;
        self.values.push(text.trim_matches('"'));
    }

    /// The fields' values, which travel where there is room for them.
    pub(crate) fn values(&self) -> &FieldValues {
        &self.values
    }

    /// As it travels: the number of all fields first.
    pub(crate) fn words(&self) -> [u64; Self::WORDS] {
        let mut words = [self.whole; Self::WORDS];
        words[1..].copy_from_slice(&self.digests);
        words
    }

    /// The fields in which two differ, given as they travel; none where only the number of all says so.
    pub(crate) fn differing(two: [(&[u64], &FieldValues); 2]) -> Vec<Difference> {
        let digest = |words: &[u64], i: usize| {
            words.get(1 + i / EACH).map_or(0, |word| word >> (i % EACH * BITS) & ((1 << BITS) - 1))
        };
        let differs = |i: &usize| digest(two[0].0, *i) != digest(two[1].0, *i);
        let value = |i: usize, (words, values): (&[u64], &FieldValues)| match values.get(i) {
            Some(value) => value.to_string(),
            None => format!("a value of digest {:03x}", digest(words, i)),
        };
        let difference = |i: usize| Difference { field: NAMES[i], values: two.map(|one| value(i, one)) };
        (0..NAMES.len()).filter(differs).map(difference).collect()
    }
}

impl Fingerprint {
    /// The fields in which two differ, given as they travel, and each one's values, for an error; `all` names the number
    /// of all fields, where that is all that is known.
    pub(crate) fn difference(two: [(&[u64], &FieldValues); 2], all: &str) -> (String, [String; 2]) {
        let differing = Self::differing(two);
        if differing.is_empty() {
            return (all.to_string(), two.map(|(words, _)| format!("{:016x}", words[0])));
        }
        let fields: Vec<_> = differing.iter().map(|difference| difference.field).collect();
        let values = [0, 1].map(|i| differing.iter().map(|d| d.values[i].clone()).collect::<Vec<_>>().join(", "));
        (fields.join(", "), values)
    }
}

impl From<u64> for Fingerprint {
    /// Of what is no layer's, by one number.
    fn from(whole: u64) -> Self {
        Self { whole, ..Self::default() }
    }
}

/// FNV-1a, its bits mixed once more.
fn hash(text: &str) -> u64 {
    let fnv = fnv1a(text);
    (fnv ^ fnv >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Activation, BalanceKind, GroupLimit, GroupScore, Payload, Score, SharedConfig, WeightAt};

    fn differing(a: Fingerprint, b: Fingerprint) -> Vec<Difference> {
        Fingerprint::differing([(&a.words(), a.values()), (&b.words(), b.values())])
    }

    fn named(a: Fingerprint, b: Fingerprint) -> Vec<&'static str> {
        differing(a, b).into_iter().map(|difference| difference.field).collect()
    }

    #[test]
    fn each_field_that_differs_is_named_and_no_other() {
        type Change = fn(&mut MoeConfig);
        let changes: [(&str, Change); 18] = [
            ("hidden", |c| c.hidden = 128),
            ("intermediate", |c| c.intermediate = 48),
            ("router.score", |c| c.router.score = Score::Sigmoid),
            ("router.logit_bias", |c| c.router.logit_bias = true),
            ("router.selection_bias", |c| c.router.selection_bias = true),
            ("router.groups", |c| {
                c.router.groups = Some(GroupLimit { groups: 2, keep: 1, rank_by: GroupScore::Max });
            }),
            ("router.renorm", |c| c.router.renorm = None),
            ("router.scale", |c| c.router.scale = 2.5),
            ("router.jitter", |c| c.router.jitter = 0.1),
            ("activation", |c| c.activation = Activation::GeluGlu),
            ("weight_at", |c| c.weight_at = WeightAt::Output),
            ("expert_bias", |c| c.expert_bias = true),
            ("shared", |c| c.shared = Some(SharedConfig { intermediate: 32, gated: false, bias: false })),
            ("aux.balance", |c| c.aux.balance = 0.01),
            ("aux.balance_kind", |c| c.aux.balance_kind = BalanceKind::HuggingFace),
            ("aux.z", |c| c.aux.z = 0.001),
            ("aux.over_ranks", |c| c.aux.over_ranks = true),
            ("payload", |c| c.payload = Payload::Mxfp8),
        ];
        let config = MoeConfig::new(64, 32, 8, 2);
        let own = Fingerprint::of(&config);
        assert_eq!(own, Fingerprint::of(&MoeConfig { recompute: true, ..config.clone() }), "each rank's own choice");
        for (i, (name, change)) in changes.iter().enumerate() {
            assert_eq!(NAMES[i], *name);
            let mut other = config.clone();
            change(&mut other);
            let other = Fingerprint::of(&other);
            assert!(own.whole != other.whole, "{name}");
            assert_eq!(named(own, other), [*name]);
            assert_eq!(named(other, own), [*name]);
            let [Difference { values: [value, changed], .. }] = &differing(own, other)[..] else { panic!("{name}") };
            assert_ne!(value, changed);
            // What has not traveled is told by its digest.
            let none = FieldValues::default();
            let unknown = Fingerprint::differing([(&own.words(), own.values()), (&other.words(), &none)]);
            let [Difference { values: [known, digest], .. }] = &unknown[..] else { panic!("{name}") };
            assert!(known == value && digest.starts_with("a value of digest "), "{unknown:?}");
        }
        let hidden = Fingerprint::of(&MoeConfig { hidden: 128, ..config.clone() });
        let values = ["64".to_string(), "128".to_string()];
        assert_eq!(differing(own, hidden), [Difference { field: "hidden", values }]);
        let types = [own.with_tokens(DType::F32), own.with_tokens(DType::BF16)];
        assert!(types[0].whole != types[1].whole);
        let values = [DType::F32, DType::BF16].map(|dtype| dtype.name().to_string());
        assert_eq!(differing(types[0], types[1]), [Difference { field: TOKENS, values }]);
        let overlap = [true, false].map(|overlapped| types[0].with_overlap(overlapped));
        assert!(overlap[0].whole != overlap[1].whole);
        let values = ["yes", "no"].map(str::to_string);
        assert_eq!(differing(overlap[0], overlap[1]), [Difference { field: OVERLAP, values }]);
        assert!(named(7.into(), 8.into()).is_empty());
    }

    /// So that a field that is added to the configuration is added to the names too.
    #[test]
    fn every_field_of_a_configuration_is_compared_here_or_by_the_dispatch() {
        let elsewhere = ["recompute", "router.num_experts", "router.top_k", "router.expert_capacity"];
        let config = serde_json::to_value(MoeConfig::new(64, 32, 8, 2)).expect("a value");
        for (key, value) in config.as_object().expect("fields") {
            let inner = value.as_object().filter(|_| ["router", "aux"].contains(&&key[..]));
            let paths = match inner {
                Some(fields) => fields.keys().map(|inner| format!("{key}.{inner}")).collect(),
                None => vec![key.clone()],
            };
            for path in paths {
                assert!(NAMES.contains(&&path[..]) || elsewhere.contains(&&path[..]), "{path}");
            }
        }
    }
}
