//! Owns the Vulkan instance: the loader library, optional validation and its messages, and the list of adapters. Not
//! here: which adapter to use (`select`).

use crate::device::adapter::Adapter;
use crate::device::error::DeviceError;
use crate::device::{diagnose, probe};
use ash::{ext, vk};
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, PoisonError};

const VALIDATION_LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";
const LAYER_SETTINGS: &CStr = c"VK_EXT_layer_settings";
const PORTABILITY: &CStr = ash::khr::portability_enumeration::NAME;
/// The maximum number of validation messages that are kept. Later ones are dropped, so that a message in a loop cannot
/// fill the memory.
const MAX_MESSAGES: usize = 1000;

/// Options of an instance.
#[derive(Clone, Copy, Debug, Default)]
pub struct InstanceOptions {
    /// Loads the Khronos validation layer with synchronisation validation (also across submissions if the layer
    /// supports it), collects its messages, and names objects for it.
    pub validation: bool,
}

/// The Vulkan instance; clones share it.
#[derive(Clone)]
pub struct Instance(Arc<Inner>);

struct Inner {
    adapters: Vec<Adapter>,
    validation: Option<Validation>,
    raw: ash::Instance,
    /// Declared last, so that it is dropped last: the library that contains the functions above.
    _entry: ash::Entry,
}

struct Validation {
    functions: ext::debug_utils::Instance,
    messenger: vk::DebugUtilsMessengerEXT,
    /// The validation callback appends here through a raw pointer; boxed so that the address is stable.
    messages: Box<Messages>,
}

#[derive(Default)]
struct Messages(Mutex<Vec<String>>);

impl Messages {
    fn push(&self, text: String) {
        let mut messages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if messages.len() < MAX_MESSAGES {
            tracing::error!("Vulkan validation: {text}");
            messages.push(text);
        }
    }
}

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Instance")
            .field("adapters", &self.0.adapters.len())
            .field("validation", &self.0.validation.is_some())
            .finish()
    }
}

impl Instance {
    /// Loads the Vulkan loader and every driver that it finds.
    ///
    /// # Errors
    /// If there is no loader, the loader is older than 1.3, there is no driver, or validation was requested but is not
    /// installed.
    pub fn new(options: &InstanceOptions) -> Result<Instance, DeviceError> {
        // SAFETY: loads the system's Vulkan loader, whose initialisers are trusted like the drivers. `Inner` keeps the
        // library until the instance is destroyed.
        let entry = unsafe { ash::Entry::load() }.map_err(DeviceError::Loader)?;
        // SAFETY: a global function of the loader that takes no arguments.
        let version = unsafe { entry.try_enumerate_instance_version() }
            .map_err(|e| failed("vkEnumerateInstanceVersion", e))?
            .unwrap_or(vk::API_VERSION_1_0);
        let (major, minor) = (vk::api_version_major(version), vk::api_version_minor(version));
        if (major, minor) < (1, 3) {
            return Err(DeviceError::OldLoader { major, minor });
        }
        let (raw, messages) = create(&entry, options.validation)?;
        let validation = match messages {
            Some(messages) => match Validation::start(&entry, &raw, messages) {
                Ok(validation) => Some(validation),
                Err(e) => {
                    // SAFETY: no object was created from this instance.
                    unsafe { raw.destroy_instance(None) };
                    return Err(failed("vkCreateDebugUtilsMessengerEXT", e));
                }
            },
            None => None,
        };
        let mut inner = Inner { adapters: Vec::new(), validation, raw, _entry: entry };
        inner.adapters = probe::adapters(&inner._entry, &inner.raw)?;
        Ok(Instance(Arc::new(inner)))
    }

    /// Returns every adapter in the drivers' order, including refused ones.
    pub fn adapters(&self) -> Vec<Adapter> {
        self.0.adapters.clone()
    }

    /// Returns the messages of the validation layer so far, each with its message id; empty without validation.
    pub fn validation_messages(&self) -> Vec<String> {
        let Some(validation) = &self.0.validation else {
            return Vec::new();
        };
        validation.messages.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether validation is enabled.
    pub fn validates(&self) -> bool {
        self.0.validation.is_some()
    }

    /// The instance-level Vulkan functions, for allocators.
    pub fn raw(&self) -> &ash::Instance {
        &self.0.raw
    }
}

impl Validation {
    fn start(entry: &ash::Entry, raw: &ash::Instance, messages: Box<Messages>) -> Result<Validation, vk::Result> {
        let functions = ext::debug_utils::Instance::new(entry, raw);
        let info = messenger_info(&messages);
        // SAFETY: the extension was enabled when the instance was created. The user data outlives the messenger:
        // `Inner` owns both and destroys the messenger first.
        let messenger = unsafe { functions.create_debug_utils_messenger(&info, None) }?;
        Ok(Validation { functions, messenger, messages })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: every device holds a clone of the instance, so no device is left. The messenger is destroyed before
        // the instance, and the library is unloaded after both.
        unsafe {
            if let Some(validation) = &self.validation {
                validation.functions.destroy_debug_utils_messenger(validation.messenger, None);
            }
            self.raw.destroy_instance(None);
        }
    }
}

fn create(entry: &ash::Entry, validate: bool) -> Result<(ash::Instance, Option<Box<Messages>>), DeviceError> {
    let app = vk::ApplicationInfo::default()
        .application_name(c"ostinato")
        .engine_name(c"ostinato")
        .api_version(vk::API_VERSION_1_3);
    let mut layers = Vec::new();
    let mut extensions = Vec::new();
    let mut settings_known = false;
    let messages = validate.then(Box::<Messages>::default);
    if validate {
        // SAFETY: global functions of the loader; the layer's name is a static C string.
        let (there, of_layer) = unsafe {
            (
                entry.enumerate_instance_layer_properties(),
                entry.enumerate_instance_extension_properties(Some(VALIDATION_LAYER)),
            )
        };
        let there = there.map_err(|e| failed("vkEnumerateInstanceLayerProperties", e))?;
        if !there.iter().any(|l| l.layer_name_as_c_str() == Ok(VALIDATION_LAYER)) {
            return Err(DeviceError::NoValidation { layer: "VK_LAYER_KHRONOS_validation" });
        }
        let of_layer = of_layer.map_err(|e| failed("vkEnumerateInstanceExtensionProperties", e))?;
        settings_known = of_layer.iter().any(|e| e.extension_name_as_c_str() == Ok(LAYER_SETTINGS));
        layers.push(VALIDATION_LAYER.as_ptr());
        extensions.push(ext::debug_utils::NAME.as_ptr());
        // The layer reads its settings whether or not the settings extension is enabled, and loaders older than the
        // extension refuse to enable it.
        if !settings_known {
            extensions.push(ext::validation_features::NAME.as_ptr());
        }
    }
    // Drivers that implement Vulkan on another interface, such as MoltenVK, are listed only on request.
    // SAFETY: a global function of the loader.
    let of_loader = unsafe { entry.enumerate_instance_extension_properties(None) };
    let of_loader = of_loader.map_err(|e| failed("vkEnumerateInstanceExtensionProperties", e))?;
    let portability = of_loader.iter().any(|e| e.extension_name_as_c_str() == Ok(PORTABILITY));
    if portability {
        extensions.push(PORTABILITY.as_ptr());
    }
    let on = vk::TRUE.to_ne_bytes();
    // The check across submissions has one of the last two names, depending on the version of the layer.
    let names = [c"validate_sync", c"syncval_submit_time_validation", c"syncval_full_validation"];
    let settings = names.map(|name| {
        let mut setting = vk::LayerSettingEXT::default()
            .layer_name(VALIDATION_LAYER)
            .setting_name(name)
            .ty(vk::LayerSettingTypeEXT::BOOL32)
            .values(&on);
        // The `ash` bindings set the number of bytes here; the specification requires the number of values.
        setting.value_count = 1;
        setting
    });
    let mut layer_settings = vk::LayerSettingsCreateInfoEXT::default().settings(&settings);
    let features = [vk::ValidationFeatureEnableEXT::SYNCHRONIZATION_VALIDATION];
    let mut validation_features = vk::ValidationFeaturesEXT::default().enabled_validation_features(&features);
    let mut messenger = messages.as_deref().map(messenger_info);

    let mut info = vk::InstanceCreateInfo::default()
        .application_info(&app)
        .enabled_layer_names(&layers)
        .enabled_extension_names(&extensions);
    if portability {
        info = info.flags(vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR);
    }
    if let Some(messenger) = &mut messenger {
        info = info.push_next(messenger);
        info =
            if settings_known { info.push_next(&mut layer_settings) } else { info.push_next(&mut validation_features) };
    }
    // SAFETY: every structure that `info` points to lives until the end of this function. The messages outlive the
    // instance, because `Inner` owns both.
    match unsafe { entry.create_instance(&info, None) } {
        Ok(raw) => Ok((raw, messages)),
        Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => Err(DeviceError::NoDriver(diagnose::no_driver())),
        Err(e) => Err(failed("vkCreateInstance", e)),
    }
}

fn messenger_info(messages: &Messages) -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(vk::DebugUtilsMessageSeverityFlagsEXT::ERROR | vk::DebugUtilsMessageSeverityFlagsEXT::WARNING)
        // General messages are omitted: they are the loader's remarks on the files of other drivers.
        .message_type(vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION)
        .pfn_user_callback(Some(collect))
        .user_data(std::ptr::from_ref(messages).cast_mut().cast())
}

/// The messenger's callback. The layer calls it on any thread that calls Vulkan.
unsafe extern "system" fn collect(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _kind: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer passes valid data with C strings that live during the call. `user` is the `Messages` set in
    // `messenger_info`, which outlives the instance.
    unsafe {
        let text = |p: *const std::ffi::c_char| {
            if p.is_null() { "?".into() } else { CStr::from_ptr(p).to_string_lossy() }
        };
        let data = &*data;
        let messages = &*user.cast::<Messages>();
        let id = text(data.p_message_id_name);
        // These two messages are not about our use of Vulkan: one is about a setting's name in this version of the
        // layer, the other about how the loader fills its dispatch tables.
        if id != "VALIDATION-SETTINGS" && id != "WARNING-vkGetDeviceProcAddr-device" {
            messages.push(format!("{id}: {}", text(data.p_message)));
        }
    }
    vk::FALSE
}

fn failed(call: &str, source: vk::Result) -> DeviceError {
    DeviceError::Vulkan { call: call.to_owned(), device: "the instance".to_owned(), source }
}
