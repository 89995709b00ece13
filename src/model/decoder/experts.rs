//! MLPs of experts.

use super::{Block, Decoder, Shape, Step};
use crate::kernels::recording::Recording;

impl Decoder<'_> {
    pub(super) fn experts(&self, _r: &mut Recording, _shape: Shape, _step: &Step, _block: &Block) {
        todo!()
    }
}
