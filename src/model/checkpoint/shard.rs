//! Tensor parallelism: the part of each weight that one of several devices holds, and the configuration of a model of
//! these parts.
//!
//! A device has some heads, some columns of each MLP, and all of what every device computes for itself: embedding, norms,
//! routers and latent vectors. The products after which the parts of all devices are summed (`o` and `down`) have the columns
//! of the device's heads and inner values; their biases are added by the first device only. Where norms are taken over all
//! heads of a row, a device computes the queries and keys of the others too.
//! The rows of the LM head are divided later, if at all (`decoder::stage`).
//! Not here: the exchange of sums (`kernels::exchange`), and what a device does with its part.

use super::{Checkpoint, SourceRef, WeightSpec};
use crate::kernels::exchange::Rank;
use crate::kernels::short_conv::CHANNEL_MULTIPLE;
use crate::memory::pack::{FRAGMENT_COLS, FRAGMENT_ROWS, Format, RowMap, SourceFormat, Transposed};
use crate::model::config::{
    Attention, DeltaNet, LayerKind, MlpKind, ModelConfig, NormedHeads, QkNorm, ShortConv, StateSpace,
};
use std::ops::Range;

/// Why a model cannot be divided among devices by tensors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// The heads cannot be divided.
    #[error(
        "{heads} query heads with {kv_heads} key heads cannot be divided among {devices} devices: {kv_heads} is less than \
         {devices} and does not divide it, or a device would have no query head; split = \"layers\" works"
    )]
    Heads {
        /// The number of query heads.
        heads: u32,
        /// The number of key heads.
        kv_heads: u32,
        /// The number of devices.
        devices: u32,
    },
    /// The columns of a matrix, in groups that have scales of their own, are fewer than devices.
    #[error(
        "the {columns} inner values of {weight}, in groups of {group}, cannot be divided among {devices} devices; split = \
         \"layers\" works"
    )]
    Columns {
        /// The name of the weight.
        weight: String,
        /// The number of columns.
        columns: u32,
        /// The number of columns of a group.
        group: u32,
        /// The number of devices.
        devices: u32,
    },
    /// The value heads of recurrent layers cannot be divided.
    #[error(
        "{heads} value heads of recurrent layers cannot be divided equally among {devices} devices; split = \"layers\" \
         works"
    )]
    Recurrent {
        /// The number of value heads.
        heads: u32,
        /// The number of devices.
        devices: u32,
    },
    /// The channels of short convolutions cannot be divided.
    #[error(
        "{channels} channels of short convolutions cannot be divided equally among {devices} devices, in multiples of \
         {multiple}; split = \"layers\" works"
    )]
    Channels {
        /// The number of channels.
        channels: u32,
        /// The number of devices.
        devices: u32,
        /// The number of which a device's channels must be a multiple.
        multiple: u32,
    },
    /// The output of state spaces has a norm over all heads, or over groups of them that cannot be divided.
    #[error(
        "state space layers norm their heads in {groups} group{}, which cannot be divided equally among {devices} devices; \
         split = \"layers\" works",
        if *.groups == 1 { "" } else { "s" }
    )]
    StateSpace {
        /// The number of groups.
        groups: u32,
        /// The number of devices.
        devices: u32,
    },
    /// The columns of a device's heads do not begin a group of a quantised matrix.
    #[error(
        "{weight} has groups of {group} columns, the heads of a device are {columns} columns from column {first} on; split \
         = \"layers\" works"
    )]
    Groups {
        /// The name of the weight.
        weight: String,
        /// The number of columns of a group.
        group: u32,
        /// The first column.
        first: u32,
        /// The number of columns.
        columns: u32,
    },
    /// The columns of a matrix are not in the order of its inputs (act-order).
    #[error("the columns of {weight} are not in the order of its inputs (act-order); split = \"layers\" works")]
    Order {
        /// The name of the weight.
        weight: String,
    },
}

/// The multiples of which the numbers of inner values of a device are, if there are enough: larger ones suit kernels.
const INNER_MULTIPLES: [u32; 6] = [256, 128, 64, 32, 16, 8];

impl Rank {
    /// Returns the device's part of `count` things.
    fn part(self, count: u32) -> Range<u32> {
        let at = |index: u32| (u64::from(count) * u64::from(index) / u64::from(self.of)) as u32;
        at(self.index)..at(self.index + 1)
    }
}

impl SourceRef {
    /// Returns the rows of the source that are packed rows `packed` of its weight, as a source of the weight of these rows;
    /// `None` if there are none.
    pub fn within(&self, packed: &Range<u32>) -> Option<SourceRef> {
        let map = self.map;
        let rows = map.source_rows(packed.clone());
        if rows.is_empty() {
            return None;
        }
        let offset = match (&self.matrix, self.transposed) {
            (Some(_), _) => 0,
            (None, Some(_)) => self.offset,
            (None, None) => {
                self.offset + u64::from(rows.start) * u64::from(map.stride) * map.format.row_bytes(map.cols)
            }
        };
        let first_row = map.first_row + rows.start * map.row_step - packed.start;
        Some(SourceRef {
            offset,
            map: RowMap { rows: rows.len() as u32, first_row, ..map },
            transposed: self.transposed.map(|of| Transposed { first: of.first + rows.start, ..of }),
            matrix: self.matrix.clone().map(|mut of| {
                of.first += rows.start;
                of
            }),
            ..self.clone()
        })
    }

    /// Returns the number of columns that cannot be divided: those of a group with a scale of its own.
    fn group(&self) -> u32 {
        match self.map.format {
            _ if self.transposed.is_some() => 1,
            SourceFormat::Numbers(_) | SourceFormat::NegatedExp => 1,
            SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) => blocks.codes().group,
            SourceFormat::Canonical(codes) => codes.group,
        }
    }

    /// Returns the number of columns whose codes share a byte of a row of which a part can be decoded.
    fn byte(&self) -> u32 {
        match self.map.format {
            SourceFormat::Canonical(codes) => 2 / codes.code_bytes(2) as u32,
            _ => 1,
        }
    }
}

impl WeightSpec {
    /// Returns the number of columns that cannot be divided. Numbers that are quantised while they are loaded can be divided
    /// anywhere: a device's groups begin with its part.
    fn group(&self) -> u32 {
        let quantised = |source: &SourceRef| source.map.format.codes().is_some();
        let packed = match self.format {
            Format::Codes(codes) if self.sources.iter().any(quantised) => codes.group,
            _ => 1,
        };
        // Groups are powers of two. A row of a single group has one scale wherever it is cut, but two codes may share a byte.
        let group = self.sources.iter().map(SourceRef::group).fold(packed, u32::max);
        if self.cols <= group { self.sources.iter().map(SourceRef::byte).fold(1, u32::max) } else { group }
    }

    /// Returns the weight with some of its columns only.
    fn columns(&self, columns: Range<u32>) -> Result<WeightSpec, ShardError> {
        let (group, count) = (self.group(), columns.len() as u32);
        if self.order.is_some() {
            return Err(ShardError::Order { weight: self.name.clone() });
        }
        if !columns.start.is_multiple_of(group) || !(count.is_multiple_of(group) || columns.end == self.cols) {
            let (weight, first) = (self.name.clone(), columns.start);
            return Err(ShardError::Groups { weight, group, first, columns: count });
        }
        let narrow = |source: &SourceRef| {
            let map = RowMap { first_col: source.map.first_col + columns.start, used_cols: count, ..source.map };
            SourceRef { map, ..source.clone() }
        };
        Ok(WeightSpec { cols: count, sources: self.sources.iter().map(narrow).collect(), ..self.clone() })
    }
}

/// Returns the rows `kept` of the ranges of a merged weight, in the order of `kept`, whose ranges are rows of the merged
/// weight. A row may be kept more than once.
pub(in crate::model) fn rows(ranges: &[&WeightSpec], kept: &[Range<u32>]) -> Vec<WeightSpec> {
    // Adjacent rows of the same range of the merged weight stay in one range.
    let mut specs: Vec<(usize, WeightSpec)> = Vec::new();
    let mut first_row = 0;
    for (kept, (index, range)) in kept.iter().flat_map(|kept| ranges.iter().enumerate().map(move |of| (kept, of))) {
        let own = range.first_row..range.first_row + range.rows;
        let here = kept.start.max(own.start)..kept.end.min(own.end);
        if here.is_empty() {
            continue;
        }
        if specs.last().is_none_or(|(of, _)| *of != index) {
            let name = match first_row {
                0 => range.merged.clone(),
                _ => format!("{}.from{first_row}", range.merged),
            };
            specs.push((index, WeightSpec { name, first_row, rows: 0, sources: Vec::new(), ..(*range).clone() }));
        }
        let (_, spec) = specs.last_mut().expect("there is one now");
        let packed = here.start - own.start..here.end - own.start;
        let at = spec.rows;
        spec.sources.extend(range.sources.iter().filter_map(|source| source.within(&packed)).map(|mut source| {
            source.map.first_row += at;
            source
        }));
        spec.rows += here.len() as u32;
        first_row += here.len() as u32;
    }
    specs.into_iter().map(|(_, spec)| spec).collect()
}

/// The heads of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct OwnHeads {
    queries: Range<u32>,
    keys: Range<u32>,
}

impl OwnHeads {
    /// Returns the heads of a device: some key heads with all their query heads, or, if there are more devices than key
    /// heads, some query heads of one key head, which several devices then have.
    fn of(kind: &Attention, rank: Rank) -> Result<OwnHeads, ShardError> {
        let Attention { heads, kv_heads, .. } = *kind;
        let group = heads / kv_heads;
        if kv_heads >= rank.of {
            let keys = rank.part(kv_heads);
            return Ok(OwnHeads { queries: keys.start * group..keys.end * group, keys });
        }
        let sharing = rank.of / kv_heads;
        if !rank.of.is_multiple_of(kv_heads) || group < sharing {
            return Err(ShardError::Heads { heads, kv_heads, devices: rank.of });
        }
        let key = rank.index / sharing;
        let part = Rank { index: rank.index % sharing, of: sharing }.part(group);
        Ok(OwnHeads { queries: key * group + part.start..key * group + part.end, keys: key..key + 1 })
    }
}

/// The heads of recurrent layers of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct OwnRecurrent {
    /// The key heads, in the device's order. Several devices have the same key head if value heads of all of them use it,
    /// and a device has one more than once if that is the only way to give each of its value heads its own.
    keys: Vec<Range<u32>>,
    values: Range<u32>,
}

impl OwnRecurrent {
    /// Returns a device's heads: adjacent value heads, whose columns of the next product are then adjacent too, and the key
    /// heads that they use. All devices have the same number, because all have room for the same sequences and snapshots.
    fn of(net: DeltaNet, rank: Rank) -> Result<OwnRecurrent, ShardError> {
        let DeltaNet { key_heads, value_heads, tiled, space, .. } = net;
        if let Some(groups) = space.map(|space| space.norm_groups).filter(|groups| !groups.is_multiple_of(rank.of)) {
            return Err(ShardError::StateSpace { groups, devices: rank.of });
        }
        if !value_heads.is_multiple_of(rank.of) {
            return Err(ShardError::Recurrent { heads: value_heads, devices: rank.of });
        }
        let values = rank.part(value_heads);
        let (own, group) = (value_heads / rank.of, value_heads / key_heads);
        let key_of = |value: u32| if tiled { value % key_heads } else { value / group };
        // With as many key heads as value heads, each value head has its own in either order.
        let count = match tiled {
            true if own.is_multiple_of(key_heads) => key_heads,
            false if own.is_multiple_of(group) => own / group,
            false if group.is_multiple_of(own) => 1,
            _ => own,
        };
        let step = if tiled { 1 } else { own / count };
        let mut keys: Vec<Range<u32>> = Vec::new();
        for key in (0..count).map(|key| key_of(values.start + key * step)) {
            match keys.last_mut() {
                Some(run) if run.end == key => run.end += 1,
                _ => keys.push(key..key + 1),
            }
        }
        Ok(OwnRecurrent { keys, values })
    }

    /// Returns the number of key heads.
    fn key_count(&self) -> u32 {
        self.keys.iter().map(|run| run.len() as u32).sum()
    }
}

/// Returns the channels of short convolutions of a device. All devices have the same number, because all have room for the same
/// sequences and snapshots.
fn own_channels(conv: ShortConv, rank: Rank) -> Result<Range<u32>, ShardError> {
    let (channels, devices, multiple) = (conv.channels, rank.of, CHANNEL_MULTIPLE);
    match channels.is_multiple_of(devices * multiple) {
        true => Ok(rank.part(channels)),
        false => Err(ShardError::Channels { channels, devices, multiple }),
    }
}

/// The part of each layer that a device has.
struct Parts<'a> {
    config: &'a ModelConfig,
    rank: Rank,
    /// For each kind of attention layers, the heads.
    heads: Vec<OwnHeads>,
    /// The heads of recurrent layers.
    recurrent: Option<OwnRecurrent>,
    /// The channels of short convolutions.
    channels: Option<Range<u32>>,
    /// For each layer, the inner values of its dense MLP.
    inner: Vec<Range<u32>>,
    /// The inner values of each expert, and of the shared expert.
    of_experts: Range<u32>,
    of_shared: Range<u32>,
}

impl Parts<'_> {
    /// Returns the rows that a device keeps of queries, keys, values and gates of a layer, and those of the other devices'
    /// queries and keys that its norms need.
    fn qkv(&self, kind: usize, rows: u32) -> Vec<Range<u32>> {
        let of = &self.config.attention_kinds[kind];
        let OwnHeads { queries, keys } = &self.heads[kind];
        let rows_of = |heads: &Range<u32>| heads.start * of.head_dim..heads.end * of.head_dim;
        let behind = |part: &Range<u32>, first: u32| part.start + first..part.end + first;
        let (q, kv) = (of.q_rows(), of.kv_rows());
        let (queries, keys) = (rows_of(queries), rows_of(keys));
        let own = [queries.clone(), behind(&keys, q), behind(&keys, q + kv), behind(&queries, q + 2 * kv)];
        let others = [0..queries.start, queries.end..q, q..q + keys.start, q + keys.end..q + kv];
        let others = others.into_iter().filter(|_| self.config.qk_norm == QkNorm::Rows);
        own.into_iter().chain(others).filter(|part| part.end <= rows).collect()
    }

    /// Returns the dimensions of recurrent layers with the device's heads; `None` if the model has none.
    fn recurrent(&self) -> Option<(DeltaNet, &OwnRecurrent)> {
        self.config.delta.zip(self.recurrent.as_ref())
    }

    /// Returns the rows that a device keeps of a recurrent layer's q, k and v.
    fn channels(&self) -> Vec<Range<u32>> {
        let Some((net, OwnRecurrent { keys, values })) = self.recurrent() else { return Vec::new() };
        let keys_from =
            |first: u32| keys.iter().map(move |run| first + run.start * net.key_dim..first + run.end * net.key_dim);
        let first = 2 * net.key_rows();
        let values = first + values.start * net.value_dim..first + values.end * net.value_dim;
        keys_from(0).chain(keys_from(net.key_rows())).chain([values]).collect()
    }

    /// Returns the rows that a device keeps of the projection of a recurrent layer's input: those of q, k, v, z, b and a; state
    /// spaces have no b.
    fn in_proj(&self) -> Vec<Range<u32>> {
        let Some((net, OwnRecurrent { values, .. })) = self.recurrent() else { return Vec::new() };
        let behind = net.channels() + net.value_rows();
        let rest = [(net.value_dim, net.channels()), (1, behind), (1, behind + net.value_heads)];
        let rest = rest.map(|(each, first)| first + values.start * each..first + values.end * each);
        let count = if net.space.is_some() { 2 } else { 3 };
        self.channels().into_iter().chain(rest.into_iter().take(count)).collect()
    }

    /// Returns the device's part of the ranges of a merged weight.
    fn of(&self, ranges: &[&WeightSpec]) -> Result<Vec<WeightSpec>, ShardError> {
        let whole = || ranges.iter().map(|range| (*range).clone()).collect::<Vec<_>>();
        let Some((layer, part)) = ranges[0].merged.strip_prefix("layers.").and_then(|name| name.split_once('.')) else {
            return Ok(whole());
        };
        let at: usize = layer.parse().unwrap_or(0);
        let (c, kind) = (self.config, self.config.attention_of[at]);
        let columns = |of: Range<u32>| ranges.iter().map(|range| range.columns(of.clone())).collect();
        // The rows of a gate projection alternate with those of the up projection.
        let each = if c.activation.has_gate() { 2 } else { 1 };
        let both = |of: &Range<u32>| each * of.start..each * of.end;
        // Of a bias that is added to a sum over devices, all but the first add zeros.
        let once = || match self.rank.index {
            0 => whole(),
            _ => whole().into_iter().map(|spec| WeightSpec { sources: Vec::new(), ..spec }).collect(),
        };
        let count: u32 = ranges.iter().map(|range| range.rows).sum();
        if let (LayerKind::ShortConv, Some(conv), Some(own)) = (c.layer_kinds[at], c.short_conv, &self.channels) {
            let taps = own.start * conv.taps..own.end * conv.taps;
            match part {
                "conv_in" | "conv_in.bias" => {
                    let kept = [0, 1, 2].map(|n| own.start + n * conv.channels..own.end + n * conv.channels);
                    return Ok(rows(ranges, &kept));
                }
                "conv" => return Ok(rows(ranges, std::slice::from_ref(&taps))),
                "conv.bias" => return Ok(rows(ranges, std::slice::from_ref(own))),
                "o" => return columns(own.clone()),
                _ => {}
            }
        }
        let (OwnHeads { queries, keys }, dim) = (&self.heads[kind], c.attention_kinds[kind].head_dim);
        // The rows or columns of heads that have `each` of them.
        let of_heads = |heads: &Range<u32>, each: u32| heads.start * each..heads.end * each;
        Ok(match part {
            "qkv" | "qkv.bias" => rows(ranges, &self.qkv(kind, count)),
            "q_norm" if c.qk_norm == QkNorm::Rows => rows(ranges, &[of_heads(queries, dim)]),
            "k_norm" if c.qk_norm == QkNorm::Rows => rows(ranges, &[of_heads(keys, dim)]),
            "latent.q" | "latent.keys" | "latent.values" => {
                rows(ranges, &[of_heads(queries, count / c.attention_kinds[kind].heads)])
            }
            "sinks" => rows(ranges, std::slice::from_ref(queries)),
            "o" => {
                let recurrent = self.recurrent().filter(|_| c.layer_kinds[at] == LayerKind::GatedDelta);
                return columns(match (recurrent, c.latent) {
                    (Some((net, own)), _) => of_heads(&own.values, net.value_dim),
                    (None, Some(latent)) => of_heads(queries, latent.value_dim),
                    (None, None) => of_heads(queries, dim),
                });
            }
            "in_proj" => rows(ranges, &self.in_proj()),
            // The taps of a channel are adjacent; the biases of all channels are behind them.
            "conv" => {
                let (taps, all) = c.delta.map_or((0, 0), |net| (net.conv_kernel, net.channels() * net.conv_kernel));
                let channels = self.channels();
                let biases = channels.iter().map(|of| of.start + all..of.end + all).filter(|of| of.end <= count);
                rows(ranges, &channels.iter().map(|of| of_heads(of, taps)).chain(biases).collect::<Vec<_>>())
            }
            "a_log" | "dt_bias" | "skip" => {
                rows(ranges, &self.recurrent().map_or(Vec::new(), |(_, own)| vec![own.values.clone()]))
            }
            "delta_norm" if c.delta.is_some_and(|net| net.space.is_some()) => {
                let of = |(net, own): (DeltaNet, &OwnRecurrent)| vec![of_heads(&own.values, net.value_dim)];
                rows(ranges, &self.recurrent().map_or(Vec::new(), of))
            }
            "gate_up" | "gate_up.bias" => rows(ranges, &[both(&self.inner[at])]),
            "down" => return columns(self.inner[at].clone()),
            "shared.gate_up" => rows(ranges, &[both(&self.of_shared)]),
            "shared.down" => return columns(self.of_shared.clone()),
            "experts.gate_up" | "experts.gate_up.bias" => {
                let experts = c.experts.map_or(0, |experts| experts.count);
                let each = count / experts.max(1);
                let part = both(&self.of_experts);
                let kept = (0..experts).map(|expert| part.start + expert * each..part.end + expert * each);
                rows(ranges, &kept.collect::<Vec<_>>())
            }
            "experts.down" => return columns(self.of_experts.clone()),
            "o.bias" | "down.bias" | "experts.down.bias" => once(),
            _ => whole(),
        })
    }
}

impl Checkpoint {
    /// Returns the part of the model that a device computes together with others, as a checkpoint of its own: its
    /// configuration has the device's heads and inner values. The block that drafts tokens is not divided, since the last
    /// device alone computes it.
    pub fn shard(&self, rank: Rank) -> Result<Checkpoint, ShardError> {
        let c = &self.config;
        let parts = self.parts(rank)?;
        let mut config = c.clone();
        for (of, heads) in config.attention_kinds.iter_mut().zip(&parts.heads) {
            let (queries, keys) = (heads.queries.len() as u32, heads.keys.len() as u32);
            let normed_with = match c.qk_norm {
                QkNorm::Rows => NormedHeads { queries: of.heads - queries, keys: of.kv_heads - keys },
                QkNorm::None | QkNorm::Heads | QkNorm::RotatedHeads => of.normed_with,
            };
            *of = Attention { heads: queries, kv_heads: keys, normed_with, ..of.clone() };
        }
        config.dense_widths = parts.inner.iter().map(|part| part.len() as u32).collect();
        let dense = (0..).zip(&config.dense_widths).filter(|(layer, _)| c.has_dense_mlp(*layer));
        config.intermediate = dense.map(|(_, width)| *width).max().unwrap_or(0);
        if let Some(experts) = &mut config.experts {
            experts.inner = parts.of_experts.len() as u32;
            experts.shared_inner = experts.shared_inner.map(|_| parts.of_shared.len() as u32);
        }
        config.delta = parts.recurrent().map(|(net, own)| DeltaNet {
            key_heads: own.key_count(),
            value_heads: own.values.len() as u32,
            space: net.space.map(|space| StateSpace { norm_groups: space.norm_groups / rank.of, ..space }),
            ..net
        });
        if let (Some(conv), Some(own)) = (&mut config.short_conv, &parts.channels) {
            conv.channels = own.len() as u32;
        }
        let mut weights = Vec::new();
        let mut all = self.weights_without_mtp();
        let block = &self.weights[all.len()..];
        if !block.is_empty() {
            config.mtp_attention = config.attention_kinds.len();
            config.attention_kinds.push(c.attention_kinds[c.mtp_attention].clone());
        }
        while let Some(first) = all.first() {
            let count = all.iter().take_while(|weight| weight.merged == first.merged).count();
            let (ranges, rest) = all.split_at(count);
            weights.extend(parts.of(&ranges.iter().collect::<Vec<_>>())?);
            all = rest;
        }
        weights.extend(block.iter().cloned());
        Ok(Checkpoint { config, weights, ..self.clone() })
    }

    fn parts(&self, rank: Rank) -> Result<Parts<'_>, ShardError> {
        let c = &self.config;
        let heads = c.attention_kinds.iter().map(|of| OwnHeads::of(of, rank)).collect::<Result<_, ShardError>>()?;
        let recurrent = c.delta.map(|net| OwnRecurrent::of(net, rank)).transpose()?;
        let channels = c.short_conv.map(|conv| own_channels(conv, rank)).transpose()?;
        // Inner values are divided in groups of the matrix whose columns they are.
        let group = |name: &str| {
            let weights = self.weights.iter().filter(|weight| weight.merged == name);
            weights.map(WeightSpec::group).max().unwrap_or(1)
        };
        let divide = |name: String, count: u32, least: u32| -> Result<Range<u32>, ShardError> {
            let least = group(&name).max(least);
            let suits = |multiple: &u32| multiple.is_multiple_of(least) && count.is_multiple_of(*multiple);
            let mut units = INNER_MULTIPLES.into_iter().filter(suits).filter(|unit| count / unit >= rank.of);
            // The others wait for the device with most inner values. Kernels take whole chunks of columns.
            let is_even = |unit: &u32| {
                unit.is_multiple_of(FRAGMENT_COLS)
                    && (count / unit).div_ceil(rank.of) * unit <= (count + count / 8) / rank.of
            };
            let unit = units.clone().find(is_even).or_else(|| units.next()).unwrap_or(least);
            let units = count.div_ceil(unit);
            if units < rank.of {
                return Err(ShardError::Columns { weight: name, columns: count, group: unit, devices: rank.of });
            }
            let part = rank.part(units);
            Ok(part.start * unit..(part.end * unit).min(count))
        };
        let mut inner = Vec::new();
        for (layer, width) in c.dense_widths.iter().enumerate() {
            let dense = c.has_dense_mlp(layer as u32);
            inner.push(if dense { divide(format!("layers.{layer}.down"), *width, 1)? } else { 0..*width });
        }
        let routed = c.mlp_kinds.iter().position(|kind| *kind == MlpKind::Experts);
        let of_layer = |part: &str| format!("layers.{}.{part}", routed.unwrap_or(0));
        let mut of_experts = (0..0, 0..0);
        if let Some(experts) = c.experts {
            // Without a gate, the first matrix of experts has as many rows, in whole blocks.
            let least = if c.activation.has_gate() { 1 } else { FRAGMENT_ROWS };
            of_experts.0 = divide(of_layer("experts.down"), experts.inner, least)?;
            of_experts.1 = match experts.shared_inner {
                Some(inner) => divide(of_layer("shared.down"), inner, least)?,
                None => 0..0,
            };
        }
        let (of_experts, of_shared) = of_experts;
        Ok(Parts { config: c, rank, heads, recurrent, channels, inner, of_experts, of_shared })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::checkpoint::WeightKind;
    use std::path::Path;

    fn open(name: &str) -> Checkpoint {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        Checkpoint::open(&folder).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Returns the devices' parts of a checkpoint.
    fn shards(checkpoint: &Checkpoint, of: u32) -> Vec<Checkpoint> {
        (0..of).map(|index| checkpoint.shard(Rank { index, of }).unwrap()).collect()
    }

    /// Goal: the devices' parts are all of the model, each once but for what all have. Method: every row of every weight of
    /// a part has one source, and rows and columns of divided weights add up.
    #[test]
    fn parts_make_the_whole() {
        for (name, of) in [
            ("qwen3-deep", 2),
            ("qwen3-deep", 3),
            ("qwen3-gqa7", 4),
            ("llama-bias", 2),
            ("moe-top1", 2),
            ("moe-top2", 2),
            ("families/gptoss-bf16", 2),
            ("hybrid-two", 2),
            ("next-moe", 2),
            ("families/gemma3-wrapped", 2),
            ("families/gemma4-moe", 2),
            ("families/deepseek2-groups", 2),
            ("families/deepseek3-blocks", 2),
            ("families/glm4lite-types", 3),
            ("families/olmo2-equal", 3),
            ("families/olmo3-old", 2),
            ("hybrid-moe", 2),
            ("families/lfm2-plain", 3),
            ("families/lfm2moe-scaled", 2),
            ("families/nemotronh-moe", 2),
        ] {
            let checkpoint = open(name);
            let parts = shards(&checkpoint, of);
            for part in &parts {
                for weight in &part.weights {
                    let mut filled = vec![0; weight.rows as usize];
                    for map in weight.sources.iter().map(|source| source.map) {
                        (0..map.rows).for_each(|row| filled[(map.first_row + row * map.row_step) as usize] += 1);
                        let used = if weight.kind == WeightKind::Matrix { weight.cols } else { map.used_cols };
                        assert_eq!((map.used_cols, map.first_col + used <= map.cols), (used, true), "{}", weight.name);
                    }
                    let none = weight.name.ends_with("bias") && weight.sources.is_empty();
                    assert!(none || filled.iter().all(|count| *count == 1), "{name}: {} {filled:?}", weight.name);
                }
            }
            let sum = |merged: &str, of: &dyn Fn(&WeightSpec) -> u64| -> u64 {
                let all = parts.iter().flat_map(|part| &part.weights);
                all.filter(|weight| weight.merged == merged).map(of).sum()
            };
            for weight in checkpoint.weights_without_mtp() {
                let found = sum(&weight.merged, &WeightSpec::elements);
                let ranges = checkpoint.weights.iter().filter(|other| other.merged == weight.merged);
                let whole: u64 = ranges.map(WeightSpec::elements).sum();
                let ends = |of: &[&str]| of.iter().any(|end| weight.merged.ends_with(end));
                let divided = [".o", ".down", ".gate_up", ".gate_up.bias", ".sinks", ".a_log", ".dt_bias", ".skip"];
                let of_conv = [".conv_in", ".conv_in.bias", ".conv.bias"];
                let normed = checkpoint.config.qk_norm == QkNorm::Rows;
                let spaces = checkpoint.config.delta.is_some_and(|net| net.space.is_some());
                let wanted = match () {
                    () if ends(&of_conv) => whole,
                    () if ends(&divided) || ends(&[".latent.q", ".latent.keys", ".latent.values"]) => whole,
                    () if normed && ends(&[".q_norm"]) => whole,
                    () if spaces && ends(&[".delta_norm"]) => whole,
                    // A key head that several devices have counts for each, and so do rows that are normed together.
                    () if ends(&[".qkv", ".qkv.bias", ".in_proj", ".conv"]) || normed && ends(&[".k_norm"]) => {
                        assert!((whole..=whole * u64::from(of)).contains(&found), "{name}: {}", weight.merged);
                        continue;
                    }
                    () => whole * u64::from(of),
                };
                assert_eq!(found, wanted, "{name}: {}", weight.merged);
            }
            let heads: u32 = parts.iter().map(|part| part.config.attention_kinds[0].heads).sum();
            assert_eq!(heads, checkpoint.config.attention_kinds[0].heads, "{name}");
        }
    }

    /// Goal: a block that drafts is whole in every part, with heads and experts that no layer has.
    #[test]
    fn a_block_that_drafts_is_not_divided() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/hybrid");
        let checkpoint = Checkpoint::open(&path).unwrap_or_else(|error| panic!("{error}"));
        let block = |of: &Checkpoint| -> Vec<(String, u32, u32)> {
            let weights = of.weights.iter().filter(|weight| weight.is_mtp());
            weights.map(|weight| (weight.name.clone(), weight.rows, weight.cols)).collect()
        };
        let whole = &checkpoint.config.attention_kinds[0];
        for part in shards(&checkpoint, 2) {
            let c = &part.config;
            assert_eq!(block(&part), block(&checkpoint));
            assert_eq!((&c.attention_kinds[c.mtp_attention], c.mtp_width), (whole, checkpoint.config.intermediate));
            assert!(c.attention_of.iter().all(|kind| c.attention_kinds[*kind].heads < whole.heads));
        }
        let with_experts = open("next-moe");
        let whole = with_experts.config.experts;
        for part in shards(&with_experts, 2) {
            assert_eq!((block(&part), part.config.mtp_experts), (block(&with_experts), whole));
            assert!(part.config.experts.is_some_and(|own| own.inner < whole.map_or(0, |whole| whole.inner)));
        }
    }

    /// Goal: each value head of a part uses the key head that it uses in the model, in both orders of heads.
    #[test]
    fn recurrent_heads_keep_their_key_heads() {
        let net = |key_heads, value_heads, tiled| DeltaNet {
            key_heads,
            value_heads,
            tiled,
            ..open("hybrid-two").config.delta.expect("a hybrid")
        };
        let key_of = |of: DeltaNet, value: u32| match of.tiled {
            true => value % of.key_heads,
            false => value / (of.value_heads / of.key_heads),
        };
        let mut counts = Vec::new();
        for (keys, values, of) in [(16, 32, 2), (16, 32, 4), (16, 48, 2), (16, 16, 2), (2, 6, 2), (4, 12, 3), (1, 4, 2)]
        {
            for tiled in [false, true] {
                let whole = net(keys, values, tiled);
                let mut own_counts = Vec::new();
                for index in 0..of {
                    let own = OwnRecurrent::of(whole, Rank { index, of }).unwrap();
                    assert_eq!(own.values, index * values / of..(index + 1) * values / of);
                    let held: Vec<u32> = own.keys.iter().cloned().flatten().collect();
                    let part = net(own.key_count(), values / of, tiled);
                    assert!(part.value_heads.is_multiple_of(part.key_heads), "{whole:?} among {of}");
                    for (local, value) in own.values.clone().enumerate() {
                        let key = held[key_of(part, local as u32) as usize];
                        assert_eq!(key, key_of(whole, value), "value head {value} of {whole:?} among {of}");
                    }
                    own_counts.push(own.key_count());
                }
                assert!(own_counts.iter().all(|count| *count == own_counts[0]), "{own_counts:?}");
                counts.push(own_counts[0]);
            }
        }
        // Where key heads take turns, whole turns need all of them, and parts of a turn a part of them.
        assert_eq!(counts, [8, 16, 4, 8, 8, 24, 8, 8, 1, 3, 4, 4, 1, 1]);
        let error = OwnRecurrent::of(net(1, 3, false), Rank { index: 0, of: 2 }).unwrap_err();
        assert_eq!(error, ShardError::Recurrent { heads: 3, devices: 2 });
        let space = |norm_groups| {
            let space =
                DeltaNet { space: Some(StateSpace { conv_bias: true, norm_groups }), ..net(norm_groups, 12, false) };
            OwnRecurrent::of(space, Rank { index: 1, of: 2 })
        };
        assert_eq!(space(1), Err(ShardError::StateSpace { groups: 1, devices: 2 }));
        assert_eq!(space(3), Err(ShardError::StateSpace { groups: 3, devices: 2 }));
        let own = space(4).expect("each device has two groups");
        assert_eq!((own.keys.first(), own.key_count(), own.values), (Some(&(2..4)), 2, 6..12));
    }

    /// Goal: parts of short convolutions have the taps of their channels. Method: every source of `conv`, whose rows are the
    /// taps, begins with a whole channel of the device.
    #[test]
    fn channels_keep_their_taps() {
        let checkpoint = open("families/lfm2moe-scaled");
        let whole = checkpoint.config.short_conv.expect("short convolutions");
        for (index, part) in (0..).zip(shards(&checkpoint, 2)) {
            let own = part.config.short_conv.expect("short convolutions");
            assert_eq!(own, ShortConv { channels: whole.channels / 2, ..whole });
            let conv = part.weights.iter().find(|weight| weight.name == "layers.0.conv").expect("the taps");
            let first = checkpoint.weights.iter().find(|weight| weight.name == "layers.0.conv").expect("the taps");
            let offset = conv.sources[0].offset - first.sources[0].offset;
            let number = conv.sources[0].map.format.row_bytes(1);
            assert_eq!(offset, u64::from(index * own.channels * own.taps) * number);
            assert_eq!(conv.rows, own.channels * own.taps);
        }
        let error = own_channels(ShortConv { channels: 60, ..whole }, Rank { index: 0, of: 2 }).unwrap_err();
        assert_eq!(error, ShardError::Channels { channels: 60, devices: 2, multiple: 4 });
    }

    #[test]
    fn heads_are_divided_by_key_heads_or_within_one() {
        let kind =
            |heads, kv_heads| Attention { heads, kv_heads, ..open("qwen3-deep").config.attention_kinds[0].clone() };
        let all = |heads, kv_heads, of| -> Vec<(Range<u32>, Range<u32>)> {
            let own = |index| OwnHeads::of(&kind(heads, kv_heads), Rank { index, of }).unwrap();
            (0..of).map(own).map(|own| (own.queries, own.keys)).collect()
        };
        assert_eq!(all(32, 8, 2), [(0..16, 0..4), (16..32, 4..8)]);
        assert_eq!(all(12, 3, 2), [(0..4, 0..1), (4..12, 1..3)]);
        assert_eq!(all(7, 1, 2), [(0..3, 0..1), (3..7, 0..1)]);
        assert_eq!(all(8, 2, 4), [(0..2, 0..1), (2..4, 0..1), (4..6, 1..2), (6..8, 1..2)]);
        for (heads, kv_heads, of) in [(6, 3, 4), (2, 2, 8)] {
            let error = OwnHeads::of(&kind(heads, kv_heads), Rank { index: 0, of }).unwrap_err();
            assert_eq!(error, ShardError::Heads { heads, kv_heads, devices: of });
        }
    }

    #[test]
    fn inner_values_stay_in_whole_groups() {
        let inner =
            |name: &str| -> Vec<u32> { shards(&open(name), 2).iter().map(|part| part.config.intermediate).collect() };
        assert_eq!(inner("llama-bias"), [72, 73]);
        // The largest unit with which parts are about even.
        let divided = |count: u32, of: u32| -> Vec<u32> {
            let mut checkpoint = open("qwen3-deep");
            checkpoint.config.dense_widths.iter_mut().for_each(|width| *width = count);
            (checkpoint.config.attention_kinds[0].heads, checkpoint.config.attention_kinds[0].kv_heads) = (4, 4);
            let part = |index| checkpoint.parts(Rank { index, of }).unwrap().inner[0].len() as u32;
            (0..of).map(part).collect()
        };
        assert_eq!(divided(768, 2), [384, 384]);
        assert_eq!(divided(2880, 2), [1408, 1472]);
        assert_eq!(divided(9728, 4), [2304, 2560, 2304, 2560]);
        // 96 inner values in groups of 32.
        assert_eq!(inner("quantised/ct-mixed"), [32, 64]);
        // A row of one group can be cut anywhere, but not within a byte, one of several between them.
        let weight = |cols: u32, fixture: &str| {
            let all = open(&format!("quantised/{fixture}")).weights;
            let of = all.into_iter().find(|weight| weight.name == "layers.0.o").unwrap();
            WeightSpec { cols, ..of }
        };
        assert!(weight(64, "gptq-8").columns(0..31).is_ok());
        assert!(weight(26, "awq").columns(0..14).is_ok() && weight(26, "awq").columns(13..26).is_err());
        let mut four_bits = open("quantised/awq");
        (four_bits.config.attention_kinds[0].heads, four_bits.config.attention_kinds[0].kv_heads) = (4, 4);
        four_bits.config.dense_widths.fill(26);
        four_bits.weights.iter_mut().filter(|of| of.name.ends_with(".down")).for_each(|of| of.cols = 26);
        let own = |index| four_bits.parts(Rank { index, of: 2 }).unwrap().inner[0].clone();
        assert_eq!([own(0), own(1)], [0..12, 12..26]);
        let error = weight(128, "gptq-8").columns(32..64).unwrap_err().to_string();
        assert!(
            error.starts_with("layers.0.o has groups of 64 columns, the heads of a device are 32 columns"),
            "{error}"
        );
    }
}
