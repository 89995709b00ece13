//! Programs in NVIDIA's PTX that are launched from command buffers beside pipelines (`VK_NVX_binary_import`). Their
//! arguments are one block of bytes, like push constants. Not here: their text, and where they are used.
//!
//! The driver checks nothing of a launch: one with too much shared memory loses the device or corrupts its memory, and so
//! does any launch with more than 48 KiB of it on a queue family with graphics. So a device takes programs only where its
//! compute family has no graphics ([`Capabilities::ptx`]), and sizes are checked here and by `Encoder::launch`.
//!
//! [`Capabilities::ptx`]: crate::device::Capabilities::ptx

use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use ash::vk;
use std::ffi::CString;
use std::sync::Arc;

/// The shared memory that a workgroup of a program may have at most, in bytes: what compute capability 9.0 has.
pub const MOST_SHARED_BYTES: u32 = 227 << 10;
/// The threads that a workgroup may have at most.
const MOST_THREADS: u32 = 1024;
/// The maximum size of an argument block in bytes.
const MOST_ARGS_BYTES: u32 = 4096;

/// The description of a program.
#[derive(Clone, Copy, Debug)]
pub struct ProgramDesc<'a> {
    /// The name of the kernel and its variant, for messages.
    pub name: &'a str,
    /// The PTX text.
    pub text: &'a str,
    /// The name of its entry, which has one parameter: the argument block.
    pub entry: &'a str,
    /// The number of threads of a workgroup.
    pub threads: u32,
    /// The dynamic shared memory of a workgroup in bytes.
    pub shared_bytes: u32,
    /// The size of the argument block in bytes, a multiple of 8.
    pub args_bytes: u32,
}

/// A program that the driver has compiled; clones share it. Recorded commands and submissions keep it alive.
#[derive(Clone)]
pub struct Program(Arc<Inner>);

struct Inner {
    module: vk::CuModuleNVX,
    function: vk::CuFunctionNVX,
    name: String,
    threads: u32,
    shared_bytes: u32,
    args_bytes: u32,
    functions: ash::nvx::binary_import::Device,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program")
            .field("name", &self.0.name)
            .field("threads", &self.0.threads)
            .field("shared_bytes", &self.0.shared_bytes)
            .finish()
    }
}

impl Program {
    /// Whether there is a clone of it.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Compiles a program. Several threads may compile programs at the same time. The driver keeps the results in a
    /// cache of its own, in the user's home directory if that can be written.
    ///
    /// # Errors
    /// `Unsupported` if the device takes no programs, `Limit` if a workgroup is too large, `Program` if the driver
    /// does not compile the text: also if it is for another generation of GPUs.
    pub fn new(device: &Device, desc: &ProgramDesc<'_>) -> Result<Program, DeviceError> {
        let logical = device.logical();
        let name = || device.adapter().name.clone();
        let Ok(functions) = &logical.binary_import else {
            return Err(DeviceError::Unsupported { device: name(), what: "programs in PTX" });
        };
        let check = |what: &str, wanted: u32, unit: &'static str, limit: u32| match wanted <= limit {
            true => Ok(()),
            false => Err(DeviceError::Limit {
                what: format!("kernel \"{}\": {what}", desc.name),
                wanted: wanted.into(),
                unit,
                device: name(),
                limit: limit.into(),
            }),
        };
        check("shared memory", desc.shared_bytes, "bytes", MOST_SHARED_BYTES)?;
        check("a workgroup", desc.threads, "invocations", MOST_THREADS)?;
        check("arguments", desc.args_bytes, "bytes", MOST_ARGS_BYTES)?;
        assert!(desc.args_bytes.is_multiple_of(8), "an argument block of {} bytes", desc.args_bytes);
        let nul = |what: &str| CString::new(what).expect("names and texts of programs have no NUL");
        let (text, entry) = (nul(desc.text), nul(desc.entry));

        let info = vk::CuModuleCreateInfoNVX {
            data_size: text.as_bytes_with_nul().len(),
            p_data: text.as_ptr().cast(),
            ..Default::default()
        };
        let mut module = vk::CuModuleNVX::null();
        // SAFETY: the device has the extension (`Logical::create`); the text ends with a NUL and lives during the call.
        let result = unsafe {
            (functions.fp().create_cu_module_nvx)(logical.raw.handle(), &info, std::ptr::null(), &raw mut module)
        };
        let refused = |source: vk::Result| match source {
            vk::Result::ERROR_DEVICE_LOST => logical.lose("vkCreateCuModuleNVX"),
            source => DeviceError::Program { kernel: desc.name.to_owned(), device: name(), source },
        };
        result.result().map_err(refused)?;
        // From here on `inner` owns the module: on an error, dropping it destroys the module.
        let mut inner = Inner {
            module,
            function: vk::CuFunctionNVX::null(),
            name: desc.name.to_owned(),
            threads: desc.threads,
            shared_bytes: desc.shared_bytes,
            args_bytes: desc.args_bytes,
            functions: functions.clone(),
            logical: logical.clone(),
        };
        let info = vk::CuFunctionCreateInfoNVX { module, p_name: entry.as_ptr(), ..Default::default() };
        // SAFETY: the module was created above, and the name ends with a NUL and lives during the call.
        let result = unsafe {
            (functions.fp().create_cu_function_nvx)(
                logical.raw.handle(),
                &info,
                std::ptr::null(),
                &raw mut inner.function,
            )
        };
        result.result().map_err(refused)?;
        Ok(Program(Arc::new(inner)))
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The size of the argument block in bytes.
    pub fn args_bytes(&self) -> u32 {
        self.0.args_bytes
    }

    /// Records a launch into a command buffer.
    ///
    /// # Panics
    /// If the program is of another device, the argument block has another size, or there are no workgroups or more than
    /// 65,535 in y or z.
    ///
    /// # Safety
    /// The command buffer is being recorded, for the compute role's queue family.
    pub(super) unsafe fn record(
        &self,
        commands: vk::CommandBuffer,
        logical: &Arc<Logical>,
        groups: [u32; 3],
        args: &[u8],
    ) {
        let Inner { function, name, threads, shared_bytes, args_bytes, .. } = &*self.0;
        assert!(Arc::ptr_eq(&self.0.logical, logical), "program \"{name}\" of another device");
        assert_eq!(args.len(), *args_bytes as usize, "bytes of arguments for \"{name}\"");
        let fits = groups[0] <= i32::MAX as u32 && groups[1..].iter().all(|n| *n <= 65_535) && !groups.contains(&0);
        assert!(fits, "\"{name}\" on {groups:?} workgroups");
        // The driver reads the block as the type that the program declares, with an alignment of 8.
        let mut block: Vec<u64> = vec![0; args.len() / 8];
        bytemuck::cast_slice_mut::<u64, u8>(&mut block).copy_from_slice(args);
        let parameters = [block.as_ptr().cast::<std::ffi::c_void>()];
        let info = vk::CuLaunchInfoNVX {
            function: *function,
            grid_dim_x: groups[0],
            grid_dim_y: groups[1],
            grid_dim_z: groups[2],
            block_dim_x: *threads,
            block_dim_y: 1,
            block_dim_z: 1,
            shared_mem_bytes: *shared_bytes,
            param_count: 1,
            p_params: parameters.as_ptr(),
            ..Default::default()
        };
        // SAFETY: the caller upholds the rule above. The function is alive, and the commands keep it alive. The sizes are
        // within the limits (`Program::new` and above). The driver copies the block during the call; it has the size that
        // the entry's only parameter has.
        unsafe { (self.0.functions.fp().cmd_cu_launch_kernel_nvx)(commands, &info) };
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let device = self.logical.raw.handle();
        // SAFETY: recorded commands hold clones, and queues keep those while they are in flight, so no use is left. A null
        // function is ignored.
        unsafe {
            if self.function != vk::CuFunctionNVX::null() {
                (self.functions.fp().destroy_cu_function_nvx)(device, self.function, std::ptr::null());
            }
            (self.functions.fp().destroy_cu_module_nvx)(device, self.module, std::ptr::null());
        }
    }
}
